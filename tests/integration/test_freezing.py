"""Cells that freeze a part of the policy, on every backend."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.audit.judge import judge
from benchbox.observer.facts import RankFacts
from benchbox.registry.contracts import Axes
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.policies import build_policy
from benchbox.registry.recipes import recipe_by_name
from tests.support.ranks import RANK_SCRIPTS, run_ranks, tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Iterable

pytestmark = pytest.mark.ranks

RANKS = {"single": 1, "ddp": 2, "fsdp1_full": 2, "fsdp1_grad_op": 2, "fsdp2": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4}
# Preset, recipe, checkpointing. Every two of the three occur in every combination.
PLAIN = [("freeze_vision", "bf16_master", False), ("train_expert_only", "fp32", False)]
RECOMPUTED = [("freeze_vision", "fp32", True), ("train_expert_only", "bf16_master", True)]
# Those of one family share the setups.
SETUPS = {"fsdp1_full": RECOMPUTED, "fsdp1_grad_op": PLAIN, "fsdp2": PLAIN, "hsdp": RECOMPUTED}
SETUPS |= {"zero1": RECOMPUTED, "zero2": PLAIN, "zero3": PLAIN}
RUN = [(backend, *setup) for backend in RANKS for setup in SETUPS.get(backend, PLAIN + RECOMPUTED)]
# One backend of each code that freezes.
DEFAULT = ("single", "ddp", "fsdp1_full", "fsdp2", "zero3")


def is_default(key: tuple[Any, ...]) -> bool:
    """Return whether this setup runs without `--exhaustive`."""
    return key[0] in DEFAULT


def each_setup(keys: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    cases = in_tiers(((key,) for key in keys), lambda case: is_default(case[0]))
    return pytest.mark.parametrize("key", cases, ids=lambda key: "-".join(map(str, key)))


Results = dict[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Results:
    """(backend, preset, recipe, checkpointing) -> what the ranks saw."""
    results_by_setup = {}
    for ranks in (1, 2, 4) if exhaustive else (1, 2):
        keys = [key for key in RUN if RANKS[key[0]] == ranks and (exhaustive or is_default(key))]
        names = ("backend", "freeze", "recipe", "checkpointing")
        cells = [tiny_cell(**dict(zip(names, key, strict=True)), world_size=ranks, batch=4 // ranks) for key in keys]
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        job = folder / "job.json"
        job.write_text(json.dumps({"cells": [cell.to_dict() for cell in cells], "out": str(folder)}))
        run_ranks(ranks, RANK_SCRIPTS / "freezing.py", str(job))
        for index, key in enumerate(keys):
            files = [folder / f"{index}-facts-{rank}.json" for rank in range(ranks)]
            facts = [RankFacts.from_dict(json.loads(file.read_text())) for file in files if file.exists()]
            results_by_setup[key] = json.loads((folder / f"{index}.json").read_text()) | {"facts": facts}
    return results_by_setup


@cache
def trains(preset: str) -> set[str]:
    """The parameters of the tiny pi05 that the preset trains."""
    roles = build_policy("pi05", "tiny", Axes()).parameter_roles()
    return {name for name, role in roles.items() if not FREEZE_PRESETS[preset].freezes(role)}


@cache
def sizes() -> dict[str, int]:
    """The numbers of elements of all parameters of the tiny pi05."""
    return {name: parameter.numel() for name, parameter in build_policy("pi05", "tiny", Axes()).named_parameters()}


@each_setup(RUN)
def test_what_is_frozen_stays_bit_for_bit_and_the_rest_moves(results: Results, key: tuple[Any, ...]) -> None:
    """Frozen parameters keep their initial value, cast for the recipe. Only moved ones have a gradient, master or state."""
    result = results[key]
    expected = trains(key[1])
    assert set(result["moved"]) == set(result["with_gradient"]) == expected
    assert {dtype for name, dtype in result["stored"].items() if name not in expected} == {recipe_by_name(key[2]).storage}
    assert result["first_moment_elements"] == result["observed"]["shard_numel"]


@each_setup(RUN)
def test_the_counts_of_the_record_are_those_of_the_whole_policy(results: Results, key: tuple[Any, ...]) -> None:
    """Read from the wrapped model and added up over shards; each rank steps its share of what trains."""
    observed = results[key]["observed"]
    assert observed["total_numel"] == sum(sizes().values())
    assert observed["trainable_numel"] == sum(sizes()[name] for name in trains(key[1]))
    sharded_over = {"single": 1, "ddp": 1}.get(key[0], 2)
    assert observed["shard_numel"] == pytest.approx(observed["trainable_numel"] / sharded_over, rel=0.02)


@each_setup(key for key in RUN if key[0] != "single")
def test_steps_agree_with_one_process(results: Results, key: tuple[Any, ...]) -> None:
    """With the same seed and the same global batch: within 2% in any recipe, within 0.01% in float32; recomputing changes
    nothing."""
    _, preset, recipe, _ = key
    reference = next(result for setup, result in results.items() if setup[:3] == ("single", preset, recipe))
    tolerance = 1e-4 if recipe == "fp32" else 0.02
    for series in ("loss", "grad_norm"):
        assert results[key][series] == pytest.approx(reference[series], rel=tolerance)


@each_setup(key for key in RUN if key[2] == "bf16_master")
def test_the_audit_raises_no_alarm_over_what_is_frozen(results: Results, key: tuple[Any, ...]) -> None:
    """Parameters without gradient, state or master are what was asked for."""
    judgement = judge(results[key]["facts"])
    assert [finding for finding in judgement.findings if finding.severity != "info"] == []
    assert judgement.not_judged.keys() == {"BXP107", "BXP503"}  # on averages and loads: there are none
