"""A resumed training is the training that never stopped, on every backend; on another one it continues from the same state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.ranks import tiny_cell
from tests.support.resumes import TrainingPart, run_parts

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

pytestmark = pytest.mark.ranks

STEPS, STOP = 4, 2
SAMPLES = 4  # of a step
RANKS = {"single": 1, "hsdp": 4} | dict.fromkeys(("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2", "zero1", "zero2", "zero3"), 2)
# Backends that shard frozen weights, each in its own way: in units of their own, and in partitions.
FROZEN = ["fsdp1_full", "zero3"]
# Every backend is left once, and gone to once or more: (from, to, ranks).
MOVES = [
    *(("single", target, 2) for target in ("ddp", "fsdp1_full", "fsdp1_grad_op", "zero1")),
    ("ddp", "fsdp2", 4),
    ("zero2", "zero3", 4),
    ("zero3", "hsdp", 4),
    ("fsdp1_full", "zero2", 4),
    *((source, "single", 1) for source in ("hsdp", "fsdp1_grad_op", "zero1", "fsdp2")),
]


def cell(backend: str, ranks: int, **changes: object) -> Cell:
    return tiny_cell(backend=backend, world_size=ranks, batch=SAMPLES // ranks, **changes)


class Trainings:
    """The trainings of this file: `straight` and `resumed` by backend, and `moved` by the backends it left and went to."""

    def __init__(self, folder: Path) -> None:
        self.straight = {
            backend: TrainingPart(cell(backend, ranks), folder / backend, STEPS, every=STOP) for backend, ranks in RANKS.items()
        }
        self.resumed = {
            backend: replace(part, folder=folder / f"{backend}-resumed", restore=part.checkpoint(STOP))
            for backend, part in self.straight.items()
        }
        section = {"trainable_only": True}
        self.frozen = {
            backend: TrainingPart(
                cell(backend, 2, freeze="train_expert_only"), folder / f"{backend}-frozen", 4, every=2, section=section
            )
            for backend in FROZEN
        }
        self.frozen_resumed = {
            backend: replace(part, folder=folder / f"{backend}-frozen-resumed", restore=part.checkpoint(2))
            for backend, part in self.frozen.items()
        }
        self.moved = {
            (source, target): TrainingPart(
                cell(target, ranks), folder / f"{source}-{target}", STOP, self.straight[source].checkpoint(STOP)
            )
            for source, target, ranks in MOVES
        }

    def run(self) -> None:
        """Run all trainings in four process groups, each after those that it continues."""
        unmoved = [*self.straight.values(), *self.resumed.values(), *self.frozen.values(), *self.frozen_resumed.values()]
        moved = list(self.moved.values())
        run_parts(_in_order(unmoved, 1))
        run_parts(_in_order(unmoved + moved, 2))
        run_parts(_in_order(unmoved + moved, 4))
        run_parts(_in_order(moved, 1))


def _in_order(parts: list[TrainingPart], ranks: int) -> list[TrainingPart]:
    """Return the trainings of so many ranks, those of ZeRO-3 last: it leaves another `linear` in the process, which rounds."""
    return sorted((part for part in parts if part.cell.world_size == ranks), key=lambda part: part.cell.backend == "zero3")


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    trainings = Trainings(tmp_path_factory.mktemp("trainings"))
    trainings.run()
    return trainings


def assert_equal_state(part: TrainingPart, expected: TrainingPart, steps: int) -> None:
    """Compare weights (masters where there are masters), moments, buffers, step counts, rates and schedule, bit for bit."""
    tensors, expected_tensors = part.tensors(steps), expected.tensors(steps)
    assert tensors.keys() == expected_tensors.keys()
    assert [key for key, tensor in tensors.items() if not torch.equal(tensor, expected_tensors[key])] == []
    assert part.trainer(steps) == expected.trainer(steps)


@pytest.mark.parametrize("backend", RANKS)
def test_four_steps_are_two_steps_and_two_after_a_resume(trainings: Trainings, backend: str) -> None:
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


@pytest.mark.parametrize("backend", RANKS)
def test_every_backend_saves_the_same_tensors(trainings: Trainings, backend: str) -> None:
    """Names, shapes and dtypes do not depend on the backend; nor do the values, but for the rounding of two steps."""
    tensors, expected = trainings.straight[backend].tensors(STOP), trainings.straight["single"].tensors(STOP)
    assert {key: (t.shape, t.dtype) for key, t in tensors.items()} == {key: (t.shape, t.dtype) for key, t in expected.items()}
    for key, tensor in tensors.items():
        if key.startswith("weights/"):
            assert torch.allclose(tensor, expected[key], atol=STOP * 1e-3), "steps at a rate of at most 1e-3"


def test_a_checkpoint_moves_to_another_backend_and_number_of_ranks_unchanged(trainings: Trainings) -> None:
    """Restored there and saved again, all of the state is what it was: between nine backends, on 1, 2 and 4 ranks."""
    assert {source for source, _ in trainings.moved} == {target for _, target in trainings.moved} == set(RANKS)
    for (source, _), moved in trainings.moved.items():
        assert_equal_state(moved, trainings.straight[source], STOP)


@pytest.mark.parametrize("backend", FROZEN)
def test_a_checkpoint_of_what_trains_resumes_with_the_frozen_weights_of_the_seed(trainings: Trainings, backend: str) -> None:
    part, resumed = trainings.frozen[backend], trainings.frozen_resumed[backend]
    saved = {key for key in part.tensors() if key.startswith("weights/")}
    everything = {key for key in trainings.straight[backend].tensors() if key.startswith("weights/")}
    assert saved < everything
    assert not any("vision" in key for key in saved)
    assert {key.partition("/")[2] for key in saved} == set(part.trainer()["parameters"])
    assert resumed.losses() == part.losses()[2:]
    assert_equal_state(resumed, part, 4)
