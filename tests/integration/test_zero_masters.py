"""ZeRO starts the float32 masters of `bf16_master` from the weights the policy was built with, as DDP does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks, tiny_cell
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

RANKS = 3  # divides few sizes, so that partitions have padding
STAGES = ("zero1", "zero2", "zero3")
SETUPS = [(stage, recipe, freeze) for stage in STAGES for recipe, freeze in (
    ("bf16_master", "full"), ("bf16_master", "freeze_vision"), ("bf16_naive", "full")
)]  # fmt: skip


def is_default(stage: str) -> bool:
    """Return whether this stage runs without `--exhaustive`: stage 1 is the code of stage 2."""
    return stage != "zero1"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """(backend, recipe, freeze) -> the results of all ranks."""
    folder = tmp_path_factory.mktemp("masters")
    setups = [setup for setup in SETUPS if exhaustive or is_default(setup[0])]
    cells = [tiny_cell(backend=b, recipe=r, freeze=f, world_size=RANKS).to_dict() for b, r, f in setups]
    job = folder / "job.json"
    job.write_text(json.dumps({"cells": cells, "out": str(folder)}))
    run_ranks(RANKS, RANK_SCRIPTS / "masters.py", str(job))
    return {
        setup: [json.loads((folder / f"{index}-{rank}.json").read_text()) for rank in range(RANKS)]
        for index, setup in enumerate(setups)
    }


@pytest.mark.parametrize("freeze", ["full", "freeze_vision"])
@pytest.mark.parametrize("stage", in_tiers(STAGES, is_default))
def test_masters_start_as_the_weights_that_were_built(results: dict, stage: str, freeze: str) -> None:
    """Bit for bit and gathered from all partitions, with padding and frozen parameters; live weights are masters rounded."""
    for rank in results[stage, "bf16_master", freeze]:
        assert rank["trained"] > 50
        assert (rank["frozen"] > 0) == (freeze != "full")
        assert rank["unlike_built"] == []
        assert rank["unlike_live"] == []


@pytest.mark.parametrize("stage", in_tiers(STAGES, is_default))
def test_a_recipe_that_casts_first_keeps_its_rounded_masters(results: dict, stage: str) -> None:
    """`bf16_naive` declares that masters, where a backend keeps any, come after the cast."""
    for rank in results[stage, "bf16_naive", "full"]:
        assert len(rank["unlike_built"]) > 50
        assert rank["unlike_live"] == []


def test_zero3_prefetches_its_default_share_of_a_bucket(results: dict) -> None:
    """DeepSpeed's default is 5e7 elements beside a reduce bucket of 5e8: a tenth, and not the whole policy."""
    for rank in results["zero3", "bf16_master", "full"]:
        settings = rank["settings"]
        assert settings["prefetch_bucket_size"] == settings["reduce_bucket_size"] // 10 > 0
