"""Joining the group of ranks that measure the machine."""

from __future__ import annotations

import pytest
import torch

from benchbox.errors import UnsupportedError
from benchbox.worker.group import join_group


@pytest.mark.parametrize("rank", ["2", "3"])
def test_more_ranks_than_gpus_are_refused_as_for_a_training(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would only say that a device ordinal is invalid, to `doctor --peaks --ranks 4` on two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(
        UnsupportedError, match=f"rank {rank} has no GPU of its own: this machine shows 2; lower world_size, or --ranks"
    ):
        join_group()
