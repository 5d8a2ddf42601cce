"""A resumed training is the training that never stopped, on every backend; on another one it continues from the same state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.spec.optim import GroupSpec, OptimSpec, SpikeSpec
from tests.support.ranks import tiny_cell
from tests.support.resumes import TrainingPart, run_parts
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

pytestmark = pytest.mark.ranks

STEPS, STOP = 2, 1
SAMPLES = 4  # of a step
TWO_RANKS = ("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "zero1", "zero2", "zero3")
FOUR_RANKS = ("hsdp", "fsdp1_hybrid", "fsdp1_hybrid_grad_op")
RANKS = {"single": 1} | dict.fromkeys(TWO_RANKS, 2) | dict.fromkeys(FOUR_RANKS, 4)
# Others are variants of these, in which groups reduce what. DDP, with the state of one process on each rank, and HSDP, which
# restores and saves on its mesh, are gone to by default.
DEFAULT = ("single", "fsdp1_full", "fsdp2", "zero2", "zero3")
DEFAULT_TARGETS = (*DEFAULT, "ddp", "hsdp")
# Backends that shard frozen weights, each in its own way: in units of their own, and in partitions.
FROZEN = ["fsdp1_full", "zero3"]
DEFAULT_FROZEN = ["zero3"]
# Backends on which accelerate upcasts parameters that are already sharded, where a recipe leaves masters to the backend.
UPCAST = ["fsdp1_full", "fsdp2"]
DEFAULT_UPCAST = ["fsdp1_full"]
# Every backend is left once, and gone to once or more: (from, to, ranks).
MOVES = [
    *(("single", target, 2) for target in ("ddp", "fsdp1_full", "fsdp1_grad_op", "zero1")),
    ("ddp", "fsdp2", 4),
    ("zero2", "zero3", 4),
    ("zero3", "hsdp", 4),
    ("fsdp1_full", "zero2", 4),
    ("hsdp", "fsdp1_hybrid", 4),
    ("fsdp1_hybrid", "fsdp1_hybrid_grad_op", 4),
    *((source, "single", 1) for source in ("fsdp1_hybrid_grad_op", "fsdp1_grad_op", "zero1", "fsdp2")),
]
# Moves from two ranks to four take twice the time: by default only HSDP divides what two ranks saved among four.
DEFAULT_MOVES = [
    *(("single", target, 2) for target in ("ddp", "fsdp1_full", "fsdp2")),
    ("fsdp1_full", "zero2", 2),
    ("zero2", "zero3", 2),
    ("zero3", "hsdp", 4),
    ("fsdp2", "single", 1),
]
# Everything of a training that has state: a backbone that thaws after the resume and warms up, a schedule that decays at the
# end, groups, averages, and a guard that compares norms with those before.
STATEFUL = OptimSpec(
    lr=1e-3,
    schedule="wsd",
    warmup_steps=2,
    total_steps=10,
    decay_steps=3,
    final_lr=1e-5,
    weight_decay=0.1,
    head_lr=2e-3,
    freeze_backbone_steps=6,
    thaw_warmup_steps=2,
    groups=(GroupSpec(match="*vision*", lr=5e-4, betas=(0.8, 0.9)),),
    ema_decay=0.9,
    ema_warmup=True,
    spike=SpikeSpec(factor=20.0, window=2),
)
STATEFUL_STEPS, STATEFUL_STOP, SPIKES = 10, 5, (3, 5)  # a guard without the norms of before would take step 5
STATEFUL_BACKENDS = ["fsdp2", "zero2"]
DEFAULT_STATEFUL = ["zero2"]  # has masters; the chain below takes all of this state over FSDP2
# A training that moves after every step, and its ranks. The backbone thaws after the third move.
CHAIN = [("single", 1), ("zero2", 2), ("fsdp2", 2), ("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("single", 1)]
CHAIN_OPTIM = replace(STATEFUL, freeze_backbone_steps=3, total_steps=7)
CHAIN_SPIKES = (5,)  # by the norms of the two steps since the thaw, before which norms say nothing
# Measured: the losses differ by at most 8e-8 of themselves, less than the spacing of float32.
CHAIN_TOLERANCE = 1e-6


def cell(backend: str, ranks: int, **changes: object) -> Cell:
    if backend == "fsdp1_hybrid":
        changes["shard_size"] = 2  # the others have their default: it may change with the backend
    return tiny_cell(backend=backend, world_size=ranks, batch=SAMPLES // ranks, **changes)


class Trainings:
    """The trainings of this file: `straight` and `resumed` by backend, `moved` by the backends it left and went to, and so on.

    The parts of `chain` are one training.
    """

    def __init__(self, folder: Path, *, exhaustive: bool) -> None:
        backends = RANKS if exhaustive else DEFAULT
        self.straight = {
            backend: TrainingPart(cell(backend, ranks), folder / backend, STEPS, every=STOP)
            for backend, ranks in RANKS.items()
            if backend in backends
        }
        self.resumed = {
            backend: replace(part, folder=folder / f"{backend}-resumed", restore=part.checkpoint(STOP))
            for backend, part in self.straight.items()
        }
        section = {"trainable_only": True}
        self.frozen = {
            backend: TrainingPart(
                cell(backend, 2, freeze="train_expert_only"), folder / f"{backend}-frozen", STEPS, every=STOP, section=section
            )
            for backend in (FROZEN if exhaustive else DEFAULT_FROZEN)
        }
        self.frozen_resumed = {
            backend: replace(part, folder=folder / f"{backend}-frozen-resumed", restore=part.checkpoint(STOP))
            for backend, part in self.frozen.items()
        }
        self.upcast = {
            backend: TrainingPart(cell(backend, 2, recipe="bf16_naive"), folder / f"{backend}-upcast", STEPS, every=STOP)
            for backend in (UPCAST if exhaustive else DEFAULT_UPCAST)
        }
        self.upcast_resumed = {
            backend: replace(part, folder=folder / f"{backend}-upcast-resumed", restore=part.checkpoint(STOP))
            for backend, part in self.upcast.items()
        }
        self.buckets = TrainingPart(cell("ddp", 4), folder / "buckets", STEPS, every=STOP)
        self.buckets_resumed = replace(self.buckets, folder=folder / "buckets-resumed", restore=self.buckets.checkpoint(STOP))
        self.stateful = {
            backend: TrainingPart(
                cell(backend, 2, optim=STATEFUL),
                folder / f"{backend}-stateful",
                STATEFUL_STEPS,
                every=STATEFUL_STOP,
                averages=False,
                spikes=SPIKES,
            )
            for backend in (STATEFUL_BACKENDS if exhaustive else DEFAULT_STATEFUL)
        }
        self.stateful_resumed = {
            backend: replace(part, folder=folder / f"{backend}-stateful-resumed", restore=part.checkpoint(STATEFUL_STOP))
            for backend, part in self.stateful.items()
        }
        chained = cell("single", 1, recipe="fp32", optim=CHAIN_OPTIM)
        self.stays = TrainingPart(chained, folder / "stays", len(CHAIN), averages=False, spikes=CHAIN_SPIKES)
        self.chain: list[TrainingPart] = []
        for step, (backend, ranks) in enumerate(CHAIN):
            moved_to = replace(chained, backend=backend, world_size=ranks, batch=SAMPLES // ranks)
            restore = self.chain[-1].checkpoint() if self.chain else None
            part = replace(self.stays, cell=moved_to, folder=folder / f"chain-{step}", steps=step + 1, restore=restore)
            self.chain.append(part)
        self.moved = {
            (source, target): TrainingPart(
                cell(target, ranks), folder / f"{source}-{target}", STOP, self.straight[source].checkpoint(STOP)
            )
            for source, target, ranks in (MOVES if exhaustive else DEFAULT_MOVES)
        }

    def run(self) -> None:
        """Run all trainings in four process groups, each after those that it continues."""
        unmoved = [*self.straight.values(), *self.resumed.values(), *self.frozen.values(), *self.frozen_resumed.values()]
        unmoved += [*self.upcast.values(), *self.upcast_resumed.values(), self.buckets, self.buckets_resumed]
        unmoved += [*self.stateful.values(), *self.stateful_resumed.values()]
        moved = list(self.moved.values())
        first, *between, last = self.chain
        run_parts([*_in_order(unmoved, 1), self.stays, first])
        run_parts(_in_order([*unmoved, *moved, *between], 2))
        run_parts(_in_order(unmoved + moved, 4))
        run_parts([*_in_order(moved, 1), last])


def _in_order(parts: list[TrainingPart], ranks: int) -> list[TrainingPart]:
    """Return the trainings of so many ranks, those of ZeRO-3 last: it leaves another `linear` in the process, which rounds."""
    return sorted((part for part in parts if part.cell.world_size == ranks), key=lambda part: part.cell.backend == "zero3")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Trainings:
    trainings = Trainings(tmp_path_factory.mktemp("trainings"), exhaustive=exhaustive)
    trainings.run()
    return trainings


def assert_equal_state(part: TrainingPart, expected: TrainingPart, steps: int) -> None:
    """Compare weights (masters where there are masters), moments, buffers, step counts, rates and schedule, bit for bit."""
    tensors, expected_tensors = part.tensors(steps), expected.tensors(steps)
    assert tensors.keys() == expected_tensors.keys()
    assert [key for key, tensor in tensors.items() if not torch.equal(tensor, expected_tensors[key])] == []
    assert part.trainer(steps) == expected.trainer(steps)


@pytest.mark.parametrize("backend", in_tiers(RANKS, DEFAULT.__contains__))
def test_two_steps_are_one_step_and_one_after_a_resume(trainings: Trainings, backend: str) -> None:
    """Losses, masters and moments, bit for bit."""
    straight, resumed = trainings.straight[backend], trainings.resumed[backend]
    assert resumed.losses() == straight.losses()[STOP:]
    assert len(resumed.losses()) == STEPS - STOP
    assert_equal_state(resumed, straight, STEPS)
    tensors = straight.tensors(STEPS)
    weights = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith("weights/")}
    for name, weight in weights.items():
        assert {tensors[f"state/{kind}/{name}"].shape for kind in ("exp_avg", "exp_avg_sq")} == {weight.shape}
        assert straight.trainer(STEPS)["parameters"][name]["numbers"] == {"step": STEPS}
        assert torch.equal(tensors[f"averages/{name}"], weight + 1), "as the ranks have set them"
    assert straight.trainer(STEPS)["averages"] == {"updates": STEPS}
    large = [weight for weight in weights.values() if weight.numel() > 1000]
    assert large
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in large), "masters, not the live weights"


@pytest.mark.parametrize("backend", in_tiers(RANKS, DEFAULT.__contains__))
def test_every_backend_saves_the_same_tensors(trainings: Trainings, backend: str) -> None:
    """Names, shapes and dtypes do not depend on the backend; nor do the values, but for the rounding of two steps."""
    tensors, expected = trainings.straight[backend].tensors(STOP), trainings.straight["single"].tensors(STOP)
    assert {key: (t.shape, t.dtype) for key, t in tensors.items()} == {key: (t.shape, t.dtype) for key, t in expected.items()}
    for key, tensor in tensors.items():
        if key.startswith("weights/"):
            assert torch.allclose(tensor, expected[key], atol=STOP * 1e-3), "steps at a rate of at most 1e-3"


def test_a_checkpoint_moves_to_another_backend_and_number_of_ranks_unchanged(trainings: Trainings, exhaustive: bool) -> None:
    """Restored there and saved again, all of the state is what it was, on 1, 2 and 4 ranks: between eleven backends, or between
    the seven of the default tests, of which two are not left."""
    sources, targets = {source for source, _ in trainings.moved}, {target for _, target in trainings.moved}
    assert targets == set(RANKS if exhaustive else DEFAULT_TARGETS)
    assert sources == set(RANKS if exhaustive else DEFAULT)
    assert {moved.cell.world_size for moved in trainings.moved.values()} == {1, 2, 4}
    for (source, _), moved in trainings.moved.items():
        assert_equal_state(moved, trainings.straight[source], STOP)


@pytest.mark.parametrize("backend", in_tiers(FROZEN, DEFAULT_FROZEN.__contains__))
def test_a_checkpoint_of_what_trains_resumes_with_the_frozen_weights_of_the_seed(trainings: Trainings, backend: str) -> None:
    part, resumed = trainings.frozen[backend], trainings.frozen_resumed[backend]
    saved = {key for key in part.tensors() if key.startswith("weights/")}
    everything = {key for key in trainings.straight[backend].tensors() if key.startswith("weights/")}
    assert saved < everything
    assert not any("vision" in key for key in saved)
    assert {key.partition("/")[2] for key in saved} == set(part.trainer()["parameters"])
    assert resumed.losses() == part.losses()[STOP:]
    assert_equal_state(resumed, part, STEPS)


def test_four_ranks_of_ddp_resume_with_the_buckets_of_later_steps(trainings: Trainings) -> None:
    """DDP arranges them anew after its first step, and four ranks round a sum by the place of a gradient in them."""
    assert_equal_state(trainings.buckets_resumed, trainings.buckets, STEPS)


@pytest.mark.parametrize("backend", in_tiers(UPCAST, DEFAULT_UPCAST.__contains__))
def test_masters_of_a_backend_that_upcasts_its_shards_are_restored_as_they_were(trainings: Trainings, backend: str) -> None:
    """Float32 before the first step too, which comes after the checkpoint was restored."""
    part, resumed = trainings.upcast[backend], trainings.upcast_resumed[backend]
    weights = [tensor for key, tensor in part.tensors(STOP).items() if key.startswith("weights/") and tensor.numel() > 1000]
    assert not any(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert resumed.losses() == part.losses()[STOP:]
    assert_equal_state(resumed, part, STEPS)


@pytest.mark.parametrize("backend", in_tiers(STATEFUL_BACKENDS, DEFAULT_STATEFUL.__contains__))
def test_ten_steps_are_five_and_five_after_a_resume_with_everything_that_has_state(trainings: Trainings, backend: str) -> None:
    """Averages, the guard of spikes, a backbone that thaws after the resume, the decay of the schedule, groups: all at once."""
    straight, resumed = trainings.stateful[backend], trainings.stateful_resumed[backend]
    rows = straight.rows()
    assert resumed.rows() == rows[STATEFUL_STOP:]
    assert_equal_state(resumed, straight, STATEFUL_STEPS)
    document = straight.trainer(STATEFUL_STEPS)
    assert [step for step, row in enumerate(rows) if row["skipped"]] == list(SPIKES)
    assert document["spikes"]["skipped"] == len(SPIKES)
    assert document["averages"] == {"updates": STATEFUL_STEPS - len(SPIKES)}
    rates = {group["name"]: [row["lr"][number] for row in rows] for number, group in enumerate(document["groups"])}
    thawed = {name for name, values in rates.items() if values[STATEFUL_STOP] == 0.0}
    assert 0 < len(thawed) < len(rates), "the head trains from the beginning"
    assert all(values[-1] < max(values) for values in rates.values()), "the schedule decays"
    assert len({max(values) for values in rates.values()}) == 3, "of the head, the backbone and the group"
    saved, tensors = straight.trainer(STATEFUL_STOP)["parameters"], straight.tensors(STATEFUL_STEPS)
    assert {bool(entry["numbers"].get("step")) for entry in saved.values()} == {True, False}, "no moment while it is frozen"
    assert all(entry["numbers"]["step"] for entry in document["parameters"].values())
    averages = [key for key in tensors if key.startswith("averages/")]
    assert sum(not torch.equal(tensors[key], tensors[key.replace("averages/", "weights/")]) for key in averages) > 50


def test_a_training_that_moves_to_another_backend_after_every_step_has_the_losses_of_one_that_stays(
    trainings: Trainings,
) -> None:
    """The moves go over ZeRO-2, FSDP2 and DDP and back, with everything that has state; losses agree to float32 rounding."""
    rows = [row for part in trainings.chain for row in part.rows()]
    expected = trainings.stays.rows()
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=CHAIN_TOLERANCE)
    assert [row["lr"] for row in rows] == [row["lr"] for row in expected]
    assert [step for step, row in enumerate(rows) if row["skipped"]] == list(CHAIN_SPIKES)
    assert trainings.chain[-1].trainer()["averages"] == {"updates": len(CHAIN) - len(CHAIN_SPIKES)}
