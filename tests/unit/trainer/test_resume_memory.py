"""Resuming makes no second copy of weights, masters or moments, neither on the device nor in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchbox.measure.memory import TensorStorageTracker
from benchbox.optim import MasterWeightOptimizer
from benchbox.optim.chunks import BUCKET_ELEMENTS
from tests.support.small_session import SmallSession, batches

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchbox.trainer.checkpoint import CheckpointManager

SIDES = (64, 96, 128)  # of square weights


def build_optimizer() -> MasterWeightOptimizer:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(side, side, dtype=torch.bfloat16)) for side in SIDES]
    return MasterWeightOptimizer(parameters, lr=1e-3, fused=True)


def take_step(optimizer: MasterWeightOptimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    optimizer._scratch.clear()  # of the step, not of the load


def tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def live_tensors(optimizer: MasterWeightOptimizer) -> list[Tensor]:
    return [*optimizer.param_groups[0]["params"], *optimizer.masters, *tensors([dict(s) for s in optimizer.state.values()])]


def extra_bytes(load: Callable[[], object], optimizer: MasterWeightOptimizer, saved: Any) -> int:
    """Return the peak of `load` above the larger of the live state before and after it. Mapped tensors do not count."""
    mapped = tensors(saved)
    file_bytes = sum(tensor.untyped_storage().nbytes() for tensor in mapped)
    with TensorStorageTracker([*mapped, *live_tensors(optimizer)]) as tracker:
        before = tracker.current_bytes
        load()
    after = file_bytes + sum(tensor.untyped_storage().nbytes() for tensor in live_tensors(optimizer))
    return tracker.peak_bytes - max(before, after)


@pytest.mark.parametrize("steps_before_load", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("chunked", [False, True])
def test_loading_takes_at_most_the_largest_tensor_above_the_live_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_before_load: int, chunked: bool
) -> None:
    """Into a fresh optimizer, which has no moments yet, and into one that has them."""
    if chunked:
        monkeypatch.setitem(BUCKET_ELEMENTS, "cpu", 2048)
    trained = build_optimizer()
    take_step(trained)
    torch.save(trained.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", map_location="cpu", mmap=True, weights_only=True)
    optimizer = build_optimizer()
    for _ in range(steps_before_load):
        take_step(optimizer)
        take_step(optimizer)
    assert extra_bytes(lambda: optimizer.load_state_dict(saved), optimizer, saved) <= 4 * max(SIDES) ** 2
    for resumed in (trained, optimizer):
        take_step(resumed)
    assert all(torch.equal(*pair) for pair in zip(live_tensors(trained), live_tensors(optimizer), strict=True))


def test_restoring_a_session_takes_the_buffers_of_a_step_and_one_tensor_above_the_live_state(
    checkpoints: CheckpointManager,
) -> None:
    """The optimizer creates its state by a step with zero gradients, and keeps the buffer for float32 gradients that every step
    uses. A second copy of masters and moments would be three times as large as one tensor."""
    width = 128
    trained = SmallSession(width=width)
    trained.step(batches(width=width))
    folder = checkpoints.save(trained, 1)
    session = SmallSession(seed=1, width=width)
    with TensorStorageTracker(live_tensors(session.optimizer)) as tracker:
        before = tracker.current_bytes
        checkpoints.restore(session, folder)
    after = sum(tensor.untyped_storage().nbytes() for tensor in live_tensors(session.optimizer))
    gradients, largest = 4 * (width**2 + width), 4 * width**2
    small = 12_000  # the state of a random generator, and step counts
    assert tracker.peak_bytes - max(before, after) <= gradients + largest + small
    assert all(torch.equal(*pair) for pair in zip(session.optimizer.masters, trained.optimizer.masters, strict=True))
