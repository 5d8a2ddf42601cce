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
from benchbox.trainer import checkpoint as checkpoint_module
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


def test_nothing_that_trains_after_a_resume_is_in_the_mapped_file(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = SmallSession()
    trained.step(batches())
    folder = checkpoints.save(trained, 1)
    loaded: dict[str, Any] = {}

    def load_state(path: Path, *, mapped: bool = False) -> Any:
        loaded[path.name] = mapped, load(path, mapped=mapped)
        return loaded[path.name][1]

    load = checkpoint_module._load_state
    monkeypatch.setattr(checkpoint_module, "_load_state", load_state)
    session = SmallSession(seed=1)
    checkpoints.restore(session, folder)
    mapped, saved = loaded["optimizer.pt"]
    assert mapped
    in_file = {tensor.untyped_storage().data_ptr() for tensor in tensors(saved)}
    assert in_file.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in live_tensors(session.optimizer))
    assert all(torch.equal(*pair) for pair in zip(session.optimizer.masters, trained.optimizer.masters, strict=True))
