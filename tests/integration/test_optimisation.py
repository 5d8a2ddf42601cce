"""All backends honour parameter groups, a frozen backbone, averages of the weights and skipped spikes alike."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor

from benchbox.registry.backends import backends
from tests.integration.rank_scripts.optimisation import FREEZE_STEPS, GROUPS, PHASED, SPIKE_STEPS, STEPS, Towers
from tests.support.ranks import RANK_SCRIPTS, run_ranks
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

TWO_RANKS = ("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "zero1", "zero2", "zero3")
FOUR_RANKS = ("hsdp", "fsdp1_hybrid", "fsdp1_hybrid_grad_op")
RANKS = {"single": 1} | dict.fromkeys(TWO_RANKS, 2) | dict.fromkeys(FOUR_RANKS, 4)
# Backends that compute the gradients of a frozen backbone and drop them
DROPPING = ("ddp", "zero1", "zero2", "zero3")
HEAD = ("head", "projection")

# A hybrid's groups are those of `fsdp1_hybrid`, and what it keeps gathered is what `fsdp1_grad_op` keeps.
ONLY_EXHAUSTIVE = ("fsdp1_hybrid_grad_op",)
each_backend = pytest.mark.parametrize("backend", in_tiers(RANKS, lambda backend: backend not in ONLY_EXHAUSTIVE))

Traces = dict[str, list[dict[str, Any]]]  # backend -> the traces of all ranks


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Traces:
    folder = tmp_path_factory.mktemp("optimisation")
    selected = {name: ranks for name, ranks in RANKS.items() if exhaustive or name not in ONLY_EXHAUSTIVE}
    for group in (("single",), TWO_RANKS, FOUR_RANKS):
        names = [name for name in group if name in selected]
        job = folder / f"{names[0]}.json"
        job.write_text(json.dumps({"backends": names, "out": str(folder)}))
        run_ranks(RANKS[names[0]], RANK_SCRIPTS / "optimisation.py", str(job))
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]
        for name, ranks in selected.items()
    }


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Return the parts of the policy of which a tensor changed."""
    return {name.partition(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def transitions(trace: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (state before, state after) for every step."""
    return list(zip(trace["rows"], trace["rows"][1:], strict=False))


def test_every_backend_is_covered() -> None:
    assert set(RANKS) == {name for name, info in backends().items() if info.target.startswith("benchbox.")}


def plain_adamw(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole weights after AdamW steps with hyperparameters that are chosen here name by name, without benchbox."""
    policy = Towers()
    for name, parameter in policy.named_parameters():
        in_head, decays = name.startswith(HEAD), parameter.dim() > 1
        lr, decay, betas = (3e-3, 0.3, (0.9, 0.95)) if in_head else (1e-2, 0.5, (0.9, 0.95))
        if fnmatchcase(name, "vision.*"):
            lr, decay, betas = 2e-3, 0.9, (0.5, 0.6)
        elif ".norm." in name:
            lr = 0.0
        optimizer = torch.optim.AdamW([parameter], lr=lr, betas=betas, eps=GROUPS.eps, weight_decay=decay if decays else 0.0)
        for whole in gradients:
            parameter.grad = whole[name].clone()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in policy.named_parameters()}


@each_backend
def test_groups_step_as_plain_adamw_on_whole_tensors(traces: Traces, backend: str) -> None:
    """Three steps from the gradients of the backend: patterns, a head with its own rate and decay, betas of a group."""
    for trace in traces[backend]:
        expected = plain_adamw(trace["groups"]["gradients"])
        weights = trace["groups"]["weights"]
        assert weights.keys() == expected.keys()
        for name, wanted in expected.items():
            torch.testing.assert_close(
                weights[name], wanted, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_the_groups_would_differ_without_their_patterns(traces: Traces) -> None:
    """Weights move, except where a pattern sets the rate to 0: the comparison above depends on the patterns."""
    start = {name: parameter.detach() for name, parameter in Towers().named_parameters()}
    end = traces["single"][0]["groups"]["weights"]
    unmoved = {name for name, tensor in start.items() if torch.equal(tensor, end[name])}
    assert unmoved == {f"{part}.norm.{kind}" for part in ("backbone", "head") for kind in ("weight", "bias")}


@each_backend
def test_a_frozen_backbone_is_untouched_and_then_trains(traces: Traces, backend: str) -> None:
    """Neither weights nor masters change, and there are no moments, for two optimizer steps of two micro-batches; then all
    ranks together train every part."""
    parts: list[set[str]] = [set() for _ in range(STEPS)]
    for rank in traces[backend]:
        for step, (before, after) in enumerate(transitions(rank["phased"])):
            parts[step] |= changed(before["stepped"], after["stepped"])
    trained = {"vision", "backbone", *HEAD}
    expected = [set(HEAD)] * FREEZE_STEPS + [set() if step in SPIKE_STEPS else trained for step in range(FREEZE_STEPS, STEPS)]
    assert parts == expected
    sizes = [sum(rank["phased"]["rows"][step]["moments"].numel() for rank in traces[backend]) for step in range(1, STEPS + 1)]
    total = sum(parameter.numel() for parameter in Towers().parameters())
    head = sum(parameter.numel() for name, parameter in Towers().named_parameters() if name.startswith(HEAD))
    copies = 2 if backend in ("ddp", *FOUR_RANKS) else 1
    assert sizes == [copies * head] * FREEZE_STEPS + [copies * total] * (STEPS - FREEZE_STEPS)


@each_backend
def test_a_frozen_backbone_has_no_gradient_where_the_backend_can_leave_it_out(traces: Traces, backend: str) -> None:
    """DDP and DeepSpeed compute it and drop it, as their `drops_frozen_gradients` says."""
    declared = backends()[backend].load().drops_frozen_gradients
    assert bool(declared) == (backend in DROPPING)
    for rank in traces[backend]:
        assert rank["phased"]["computed"] == [backend in DROPPING] * FREEZE_STEPS + [True] * (STEPS - FREEZE_STEPS)


@pytest.mark.parametrize("backend", [name for name in RANKS if RANKS[name] == 2])
def test_the_norm_while_the_backbone_is_frozen_is_that_of_the_head(traces: Traces, backend: str) -> None:
    """A dropped gradient has no part in the norm: all backends of two ranks have the same norms."""
    norms = [row["grad_norm"] for row in traces[backend][0]["phased"]["rows"][1:]]
    wanted = [row["grad_norm"] for row in traces["fsdp1_full"][0]["phased"]["rows"][1:]]
    finite = [step for step in range(STEPS) if step != SPIKE_STEPS[0]]
    assert [norms[step] for step in finite] == pytest.approx([wanted[step] for step in finite], rel=0.02)
    assert not math.isfinite(norms[SPIKE_STEPS[0]])


@each_backend
def test_rates_follow_optimizer_steps_through_freezing_thawing_and_skipped_steps(traces: Traces, backend: str) -> None:
    """The backbone has rate 0 while it is frozen, and then warms up; the schedule goes on over skipped steps."""
    backbone = [0.0] * FREEZE_STEPS + [PHASED.lr / 2] + [PHASED.lr] * (STEPS - FREEZE_STEPS - 1)
    for rank in traces[backend]:
        rates = [row["lr"] for row in rank["phased"]["rows"][1:]]
        assert rates == [pytest.approx((rate, rate, PHASED.lr, PHASED.lr)) for rate in backbone]


@each_backend
def test_spikes_are_skipped_by_all_ranks_and_change_nothing(traces: Traces, backend: str) -> None:
    """A step with NaN on one rank and one with a norm above the bound: moments and averages stay as well."""
    for rank in traces[backend]:
        for step, (before, after) in enumerate(transitions(rank["phased"])):
            assert after["skipped"] == (step in SPIKE_STEPS)
            if step in SPIKE_STEPS:
                assert changed(before["stepped"], after["stepped"]) == set()
                assert torch.equal(before["moments"], after["moments"])
                assert changed(before["averages"], after["averages"]) == set()
            else:
                assert after["judged_norm"] == pytest.approx(after["grad_norm"], rel=1e-5)
        assert math.isfinite(rank["phased"]["rows"][-1]["loss"])


@each_backend
def test_averages_follow_the_stepped_tensors(traces: Traces, backend: str) -> None:
    """They are float32, sharded as what is stepped, and move by the decay once per step that is taken."""
    for rank in traces[backend]:
        rows = rank["phased"]["rows"]
        expected = {name: tensor.float() for name, tensor in rows[0]["stepped"].items()}
        for row in rows[1:]:
            if not row["skipped"]:
                expected = {name: 0.5 * average + 0.5 * row["stepped"][name] for name, average in expected.items()}
            assert row["averages"].keys() == expected.keys()
            for name, average in row["averages"].items():
                assert average.dtype == torch.float32
                torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)


@each_backend
def test_averaged_weights_are_swapped_in_and_out_bit_for_bit(traces: Traces, backend: str) -> None:
    """Forward passes compute with them inside only, although a sharding backend may have kept gathered weights."""
    for rank in (rank["phased"] for rank in traces[backend]):
        assert changed(rank["stepped_inside"], rank["rows"][-1]["averages"]) == set()
        assert changed(rank["stepped_after"], rank["rows"][-1]["stepped"]) == set()
        assert rank["loss_after"] == rank["loss_before"]
        assert abs(rank["loss_inside"] / rank["loss_before"] - 1) > 0.005
        if RANKS[backend] == 2:
            reference = traces["ddp"][0 if rank is traces[backend][0]["phased"] else 1]["phased"]
            assert rank["loss_inside"] == pytest.approx(reference["loss_inside"], rel=2e-3)
            assert rank["loss_next"] == pytest.approx(reference["loss_next"], rel=2e-3)
