"""Sessions from policies on the meta device start as sessions from policies that were built whole, and take less memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchbox.registry.policies import find_policies
from tests.support.ranks import RANK_SCRIPTS, run_ranks, tiny_cell
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

RANKS = {"single": 1, "hsdp": 4} | dict.fromkeys(("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "zero1", "zero2", "zero3"), 2)
ONE_OF_EACH = ("fsdp1_full", "fsdp2", "zero3")  # one backend of each code that fills shards
WITH_LAYERS_OF_THEIR_OWN = ("cosmos_droid", "vitra")
SETUPS = [
    *((backend, "pi05", "bf16_master", "full") for backend in RANKS),
    *((backend, "pi05", "fp32", "full") for backend in ONE_OF_EACH),
    *((backend, "pi05", "bf16_naive", "full") for backend in ONE_OF_EACH),
    *((backend, "pi05", "bf16_master", "freeze_vision") for backend in ONE_OF_EACH),
    *((backend, policy, "bf16_master", "full") for backend in ONE_OF_EACH for policy in WITH_LAYERS_OF_THEIR_OWN),
    ("fsdp1_full", "pi0", "bf16_master", "full"),
    *(("fsdp2", policy, "fp32", "full") for policy in find_policies() if policy not in ("pi05", *WITH_LAYERS_OF_THEIR_OWN)),
]
# By default: each code that fills shards, the policies with layers of their own, and each recipe and freezing on one backend.
DEFAULT = [
    *((backend, "pi05", "bf16_master", "full") for backend in ONE_OF_EACH),
    *(("fsdp2", policy, "bf16_master", "full") for policy in WITH_LAYERS_OF_THEIR_OWN),
    ("zero3", "cosmos_droid", "bf16_master", "full"),
    ("fsdp2", "pi05", "bf16_naive", "full"),
    ("fsdp1_full", "pi0", "bf16_master", "full"),
    ("zero3", "pi05", "fp32", "full"),
    ("zero3", "pi05", "bf16_master", "freeze_vision"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """(backend, policy, recipe, freeze) -> the results of all ranks."""
    results_by_setup = {}
    for ranks in (1, 2, 4) if exhaustive else (2,):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        setups = [setup for setup in SETUPS if RANKS[setup[0]] == ranks and (exhaustive or setup in DEFAULT)]
        cells = [
            tiny_cell(backend=b, policy=p, recipe=r, freeze=f, world_size=ranks, batch=1).to_dict() for b, p, r, f in setups
        ]
        job = folder / "job.json"
        job.write_text(json.dumps({"cells": cells, "out": str(folder)}))
        run_ranks(ranks, RANK_SCRIPTS / "construction.py", str(job))
        for index, setup in enumerate(setups):
            results_by_setup[setup] = [json.loads((folder / f"{index}-{rank}.json").read_text()) for rank in range(ranks)]
    return results_by_setup


@pytest.mark.parametrize("setup", in_tiers(((setup,) for setup in SETUPS), lambda setup: setup[0] in DEFAULT), ids="-".join)
def test_a_session_starts_with_the_bits_of_direct_construction(results: dict, setup: tuple[str, ...]) -> None:
    """Weights, masters and buffers on every rank, and the loss and the gradient norm of the first step."""
    for rank in results[setup]:
        assert rank["tensors"] > 50
        assert rank["different"] == []
        for series in ("loss", "grad_norm"):
            deferred, direct = rank[series]
            assert deferred == direct


# Sizes of shards over two ranks, relative to the policy in float32: of bf16_master under FSDP float32 shards, under ZeRO-3
# bfloat16 partitions and float32 ones for the masters.
SHARDS = {"fsdp2": 0.5, "zero3": 0.75}
IN_SHARDS = [(backend, policy) for policy in ("pi05", *WITH_LAYERS_OF_THEIR_OWN) for backend in SHARDS]


@pytest.mark.parametrize(("backend", "policy"), in_tiers(IN_SHARDS, lambda pair: (*pair, "bf16_master", "full") in DEFAULT))
def test_construction_takes_the_shards_of_a_rank_and_a_unit(results: dict, backend: str, policy: str) -> None:
    """A policy that is built whole first takes at least its full size."""
    for rank in results[backend, policy, "bf16_master", "full"]:
        deferred, direct = rank["peak_bytes"]
        assert deferred <= SHARDS[backend] * rank["full_bytes"] + rank["unit_bytes"]
        assert deferred < rank["full_bytes"] <= direct


def test_construction_under_fsdp1_takes_less_than_the_policy(results: dict) -> None:
    """FSDP1 concatenates the parameters of a unit before it shards them, so two copies of the largest unit exist.

    The largest unit of the tiny pi0 is a fifth of the policy.
    """
    for rank in results["fsdp1_full", "pi0", "bf16_master", "full"]:
        deferred, direct = rank["peak_bytes"]
        assert deferred < rank["full_bytes"] <= direct
