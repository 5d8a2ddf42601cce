"""Estimates of cells."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from benchbox.data.loading.loader import open_samples
from benchbox.errors import UnsupportedError
from benchbox.estimation import Estimator
from benchbox.estimation.estimate import _read_batch
from benchbox.estimation.extent import read_extent
from benchbox.estimation.parts import read_parts
from benchbox.registry.contracts import Axes
from benchbox.registry.recipes import recipe_by_name
from benchbox.session.build import open_cell_data
from benchbox.session.construction import construct_policy
from benchbox.spec.cell import DataSpec, OptimSpec
from benchbox.spec.optim import SpikeSpec
from tests.support.datasets import LENGTHS, write_unequal_robots
from tests.support.ranks import tiny_cell


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


def test_one_trace_serves_all_backends_ranks_and_micro_steps(estimator):
    cells = [
        tiny_cell(backend=backend, world_size=ranks, accumulation=accumulation)
        for backend, ranks, accumulation in (("ddp", 8, 1), ("fsdp2", 1024, 1), ("zero2", 64, 2), ("hsdp", 8, 3))
    ]
    estimates = [estimator.estimate(cell) for cell in cells]
    assert len(estimator._traces) == 1
    assert len({estimate.peak_bytes for estimate in estimates}) == len(cells)
    assert sum(estimates[0].components.values()) == estimates[0].peak_bytes
    assert not dist.is_initialized()


def test_a_policys_own_collective_is_counted_where_there_are_ranks_to_agree(estimator):
    """The vote on the optional parts of a batch, the mean loss, and the gradient norm; gradients are reduced otherwise."""
    assert estimator.estimate(tiny_cell(backend="fsdp2", world_size=8)).collectives["all_reduce"]["count"] == 3


def test_steps_of_a_frozen_backbone_and_unknown_optimizers_are_not_predicted(estimator, monkeypatch):
    frozen = tiny_cell(backend="ddp")
    frozen = replace(frozen, optim=replace(frozen.optim, freeze_backbone_steps=10))
    with pytest.raises(UnsupportedError, match=r"frozen for 10 steps \(optim.freeze_backbone_steps\)"):
        estimator.estimate(frozen, 9)
    assert estimator.estimate(frozen, 10) == estimator.estimate(frozen)
    momentum = replace(recipe_by_name("fp32"), optimizer="torch.optim:SGD")
    monkeypatch.setitem(sys.modules["benchbox.estimation.estimate"].__dict__, "recipe_by_name", lambda _: momentum)
    with pytest.raises(UnsupportedError, match=r"what torch\.optim:SGD of recipe fp32 keeps for each parameter is not known"):
        estimator.estimate(tiny_cell(backend="ddp", recipe="fp32"))


def test_averages_cost_what_they_keep(estimator):
    plain = tiny_cell(backend="fsdp2", world_size=8)
    averaged = replace(plain, optim=replace(plain.optim, ema_decay=0.99))
    difference = estimator.estimate(averaged).resident_bytes - estimator.estimate(plain).resident_bytes
    assert difference == estimator.estimate(plain).components["parameters"]


@pytest.mark.parametrize(("backend", "size"), [("fsdp2", 0), ("zero1", 4), ("zero2", 4), ("zero3", 8)])
def test_the_spike_guard_agrees_on_a_norm_for_which_deepspeed_computes_those_of_its_groups_once_more(estimator, backend, size):
    groups = estimator.estimate(tiny_cell(backend="zero2")).collectives["all_gather"]["count"]  # one for each
    plain = tiny_cell(backend=backend, world_size=8)
    guarded = replace(plain, optim=replace(plain.optim, spike=SpikeSpec()))
    before, after = (estimator.estimate(cell).collectives["all_reduce"] for cell in (plain, guarded))
    assert after["bytes"] - before["bytes"] == 4 + size * groups
    assert after["count"] - before["count"] == 1 + (groups if size else 0)


def test_a_dataset_that_is_elsewhere_is_estimated_on_generated_samples_and_said_so(estimator):
    cell = tiny_cell(data=DataSpec(kind="lerobot", path="/nowhere/to/be/found", workers=0))
    (note,) = estimator.estimate(cell).notes
    assert note.startswith("with generated samples")
    longest = estimator.estimate(replace(cell, padding="longest"))
    assert not longest.has_size_of_step, "the samples that are measured have other sizes"


def test_there_is_no_prediction_for_a_backend_without_a_formula(estimator):
    with pytest.raises(UnsupportedError, match="no formula for the memory of backend somebodys"):
        estimator.estimate(tiny_cell(backend="somebodys"))


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpointing": True, "attention": "sdpa"},
        {"policy": "pi07_low_level", "cams": 4, "recipe": "fp32_autocast"},
        {"policy": "vitra", "freeze": "freeze_vision", "backend": "fsdp1_full"},
        {"policy": "value", "recipe": "fp32", "backend": "zero3"},
    ],
    ids=lambda changes: changes.get("policy", "pi05"),
)
def test_a_small_policy_is_traced_on_real_tensors_with_the_same_result(monkeypatch, changes):
    """Memory by component, communication and FLOPs are those of a trace on fake tensors."""
    module = sys.modules[Estimator.__module__]
    traced = []
    through = module.make_fake
    monkeypatch.setattr(module, "make_fake", lambda *arguments: (traced.append("fake"), through(*arguments)))
    cell = tiny_cell(**({"backend": "fsdp2", "world_size": 2} | changes))
    real = Estimator().estimate(cell)
    assert traced == []
    monkeypatch.setattr(module, "MAX_REAL_WORK", real.total_numel * cell.batch - 1)
    assert Estimator().estimate(cell) == real
    assert traced == ["fake"]


def test_zero3_has_a_trace_of_its_own_which_serves_every_step_of_the_same_parts():
    """Other backends need no uses of modules. pi05 uses the same modules in every step."""
    estimator = Estimator()
    estimates = [estimator.estimate(tiny_cell(backend="zero3", accumulation=3), step) for step in (None, 4, 5)]
    assert estimates[0] == estimates[1] == estimates[2]
    estimator.estimate(tiny_cell(backend="ddp"), 5)
    assert [bool(timeline.uses) for _, timeline, _ in estimator._traces.values()] == [True, False]


def test_the_activations_of_a_step_under_zero3_are_of_the_parts_that_its_samples_have():
    """A subgoal is encoded by the vision tower, whose activations are kept."""
    estimator, cell = Estimator(), tiny_cell(policy="pi07_paligemma", backend="zero3", batch=1)
    parts = read_parts(cell, policy_of(cell), 4)
    kept = [estimator.estimate(cell, step).components["activations"] for step in range(4)]
    with_subgoal, without = (
        [size for present, size in zip(parts, kept, strict=True) if ("subgoal" in present) == has] for has in (True, False)
    )
    assert with_subgoal
    assert without
    assert min(with_subgoal) > max(without)


def test_the_flops_of_the_smallest_step_are_those_of_samples_that_lack_all_optional_parts():
    """Every step has the same smallest one, whatever parts it has itself; a policy without such parts has no smaller step."""
    estimator, cell = Estimator(), tiny_cell(backend="zero3", world_size=1, batch=1)
    estimates = [estimator.estimate(cell, step) for step in range(8)]
    flops = [(entry.model_flops + entry.recomputed_flops, entry.smallest_step_flops) for entry in estimates]
    assert min(total for total, _ in flops) == pytest.approx(flops[0][1], rel=0.01)
    assert max(total for total, _ in flops) > 1.1 * flops[0][1]
    assert all(smallest == pytest.approx(flops[0][1], rel=0.01) for _, smallest in flops)
    value = estimator.estimate(tiny_cell(policy="value", checkpointing=True))
    assert value.smallest_step_flops == value.model_flops + value.recomputed_flops


def test_the_smallest_step_of_a_policy_with_optional_parts_and_without_a_formula_is_not_known(monkeypatch):
    monkeypatch.setattr("benchbox.estimation.parts.hasattr", lambda *_: False, raising=False)
    assert Estimator().estimate(tiny_cell(policy="pi07_low_level")).smallest_step_flops is None


def policy_of(cell):
    return construct_policy(cell, Axes(cams=cell.cams), torch.device("cpu"), ())


def test_the_parts_of_a_micro_step_are_those_that_any_rank_has():
    """Each rank has consecutive samples of a step, and each micro-step consecutive ones of a rank's."""
    one, two, four = (
        read_parts(cell, policy_of(cell), 6)
        for cell in (tiny_cell(policy="pi07_low_level", world_size=n, batch=1, accumulation=4 // n) for n in (1, 2, 4))
    )
    assert len({*one}) > 1
    assert two == tuple(one[first] | one[first + 2] for step in range(6) for first in (4 * step, 4 * step + 1))
    assert four == tuple(frozenset().union(*one[4 * step : 4 * step + 4]) for step in range(6))


def test_parts_are_not_read_from_very_many_samples_nor_for_a_policy_that_needs_all_it_reads():
    assert read_parts(tiny_cell(policy="value"), policy_of(tiny_cell(policy="value")), 2) == ()
    many = tiny_cell(policy="pi07_low_level", batch=1024)
    assert len(read_parts(many, policy_of(many), 2)) == 2
    assert read_parts(many, policy_of(many), 3) == ()


def test_recipes_store_what_they_say(estimator):
    """Per parameter under ZeRO-1 with one copy of everything on two ranks: what the rank keeps between steps."""
    numel = estimator.estimate(tiny_cell()).total_numel
    sizes = {"fp32": 4 + 12 / 2, "bf16_master": 2 + 12 / 2, "bf16_pure": 2 + 6 / 2}
    for recipe, size in sizes.items():
        estimate = estimator.estimate(tiny_cell(backend="zero1", recipe=recipe, optim=OptimSpec()))
        assert estimate.resident_bytes == pytest.approx(numel * size, rel=1e-3), recipe


def test_cells_whose_steps_have_other_samples_do_not_share_a_trace():
    """Optional parts of a policy run if a sample of the step has them: here the first one lacks what the next three have."""
    estimator = Estimator()
    for accumulation in (1, 4):
        cell = tiny_cell(policy="pi07_low_level", backend="single", world_size=1, batch=1, accumulation=accumulation, seed=4)
        alone = Estimator().estimate(cell)
        assert estimator.estimate(cell) == alone


def test_a_batch_may_have_more_samples_than_the_dataset_has_frames():
    """Training goes on with the next epoch there."""
    cell = tiny_cell(backend="single", world_size=1, batch=400, data=DataSpec(kind="sample", workers=0))
    samples = open_samples(cell.data, policy_of(cell).batch_spec(), cell.seed)
    assert len(samples) < cell.batch
    batch, _ = _read_batch(cell, samples)
    assert len(batch["action"]) == cell.batch
    assert torch.equal(batch["action"][len(samples)], batch["action"][0])


def test_a_batch_without_common_padding_needs_less_memory_and_the_note_says_which_batch_it_is():
    """The sample dataset has four cameras of the six, and its prompts are shorter than the policy's."""
    cells = [
        tiny_cell(backend="single", world_size=1, cams=6, data=DataSpec(kind="sample", workers=0), padding=padding)
        for padding in ("full", "longest")
    ]
    full, longest = map(Estimator().estimate, cells)
    assert longest.peak_bytes < full.peak_bytes
    assert longest.model_flops < 0.8 * full.model_flops
    assert full.notes == []
    (note,) = longest.notes
    assert "a batch with a longer text or more cameras needs more memory" in note


def unequal_cell(tmp_path, **changes):
    """Return a cell whose first rank has the frames of the robot with one camera and a short task, and a second rank others."""
    robots = write_unequal_robots(tmp_path)
    data = replace(robots, datasets=tuple(replace(dataset, weight=None) for dataset in robots.datasets))
    return tiny_cell(policy="pi0", cams=3, data=data, padding="longest", **({"order": "sequential"} | changes))


def micro_batch_sizes(cell, step=0):
    """Return the cameras and prompt tokens of the micro-batches of a step, by rank."""
    sizes = []
    for rank in range(cell.world_size):
        with closing(open_cell_data(cell, policy_of(cell), rank)) as stream:
            batches = list(islice(stream, step * cell.accumulation, (step + 1) * cell.accumulation))
        sizes.append([(batch["images"].shape[2], batch["prompt_mask"].shape[1]) for batch in batches])
    return sizes


@pytest.mark.parametrize("split", [{"world_size": 2}, {"accumulation": 2, "backend": "single", "world_size": 1}])
def test_a_trimmed_batch_is_as_large_as_that_of_the_rank_or_micro_step_with_the_longest_text(tmp_path, split):
    """The first micro-batch, which has more samples than are read for optional parts, has the short task alone."""
    cell = unequal_cell(tmp_path, batch=sum(LENGTHS), **split)
    (first,), (second,) = micro_batch_sizes(cell) if cell.world_size == 2 else zip(*micro_batch_sizes(cell), strict=True)
    assert first < second
    policy = policy_of(cell)
    samples = open_samples(cell.data, policy.batch_spec(), cell.seed)
    extent = read_extent(cell, samples, policy.batch_spec().trimmable).extent
    batch, _ = _read_batch(cell, samples, extent)
    assert (batch["images"].shape[2], batch["prompt_mask"].shape[1]) == second
    alone = replace(cell, world_size=1, accumulation=1, backend="single")
    assert Estimator().estimate(cell).model_flops > 1.5 * Estimator().estimate(alone).model_flops


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("order", ["frame_shuffle", "episode_shuffle"])
def test_no_micro_batch_of_a_step_is_larger_than_its_extent(tmp_path, order, step):
    cell = unequal_cell(tmp_path, batch=2, world_size=3, accumulation=2, order=order, seed=3)
    cell = replace(cell, data=replace(cell.data, block=2, buffer=12))
    policy = policy_of(cell)
    samples = open_samples(cell.data, policy.batch_spec(), cell.seed)
    of_step = read_extent(cell, samples, policy.batch_spec().trimmable, step)
    ranks = micro_batch_sizes(cell, step)
    sizes = [size for rank in ranks for size in rank]
    assert len(set(sizes)) > 1
    largest = (len(of_step.extent.cameras), of_step.extent.lengths["prompt"])
    assert largest == tuple(map(max, zip(*sizes, strict=True)))


def test_a_step_whose_last_micro_batches_are_smaller_has_not_the_size_that_is_predicted(tmp_path):
    """The gradients of earlier micro-batches are kept beside the last one."""
    cell = unequal_cell(tmp_path, batch=1, world_size=1, accumulation=2, backend="single", order="frame_shuffle")
    policy = policy_of(cell)
    samples = open_samples(cell.data, policy.batch_spec(), cell.seed)
    reached = [read_extent(cell, samples, policy.batch_spec().trimmable, step).is_reached for step in range(8)]
    sizes = [micro_batch_sizes(cell, step)[0] for step in range(8)]
    assert reached == [last == max(first, last) for first, last in sizes]
    assert set(reached) == {True, False}


def test_a_step_of_more_samples_than_are_read_is_estimated_with_full_padding_and_said_so(tmp_path, monkeypatch):
    longest = unequal_cell(tmp_path, batch=2)
    assert Estimator().estimate(longest).peak_bytes < Estimator().estimate(replace(longest, padding="full")).peak_bytes
    for module in ("estimate", "extent"):
        monkeypatch.setattr(sys.modules[f"benchbox.estimation.{module}"], "MAX_SAMPLES_READ", 3)
    bound, full = (Estimator().estimate(replace(longest, padding=padding)) for padding in ("longest", "full"))
    assert bound.components == full.components
    (note,) = bound.notes
    assert note.startswith("with full padding, than which no batch needs more memory")


def test_cells_of_other_first_steps_share_no_trace_where_padding_is_left_out(tmp_path):
    """A third micro-step brings the long task into the step, and so may another seed."""
    estimator, cell = Estimator(), unequal_cell(tmp_path, batch=sum(LENGTHS) // 2, backend="single", world_size=1)
    two, three = (estimator.estimate(replace(cell, accumulation=steps)).model_flops / steps for steps in (2, 3))
    assert two < three
    estimator.estimate(replace(cell, accumulation=2, seed=1))
    assert len(estimator._traces) == 3


def test_a_hybrid_shards_over_as_many_ranks_as_the_cell_says(estimator):
    two, four = (estimator.estimate(tiny_cell(backend="hsdp", world_size=8, shard_size=size)) for size in (None, 4))
    assert "all_gather" in two.collectives_by_ranks["2"]
    assert "all_gather" in four.collectives_by_ranks["4"]
    assert four.resident_bytes < 0.6 * two.resident_bytes


def test_a_trace_under_autocast_is_one_of_its_own_and_keeps_products_in_16_bits():
    estimator = Estimator()
    full, mixed = (estimator.estimate(tiny_cell(recipe=recipe)) for recipe in ("fp32", "fp32_autocast"))
    assert 0 < mixed.logits_bytes < full.logits_bytes
    assert mixed == Estimator().estimate(tiny_cell(recipe="fp32_autocast"))


@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_steps_are_not_predicted(estimator, compiled):
    with pytest.raises(UnsupportedError, match="what a compiled graph keeps for its backward"):
        estimator.estimate(tiny_cell(compile=compiled))


def test_kahan_summation_keeps_what_rounding_lost_beside_the_two_moments(estimator):
    """Under ZeRO-1 on two ranks: the weight, and half of the stepped weight and of three tensors of state, in 2 bytes each."""
    estimate = estimator.estimate(tiny_cell(backend="zero1", recipe="bf16_kahan", optim=OptimSpec()))
    assert estimate.resident_bytes == pytest.approx(estimate.total_numel * (2 + 4 * 2 / 2), rel=1e-3)
