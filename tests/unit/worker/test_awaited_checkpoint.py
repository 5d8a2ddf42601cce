"""The checkpoint that a job names is the one that every rank continues from."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import DataError
from benchbox.store.checkpoints import MANIFEST
from benchbox.worker.training import _awaited

if TYPE_CHECKING:
    from pathlib import Path


def test_a_rank_waits_for_a_checkpoint_that_its_machine_does_not_see_yet(tmp_path: Path) -> None:
    """Another machine has written it. An older one, which is visible, would give its ranks other weights and other data."""
    older, named = tmp_path / "step-00000002", tmp_path / "step-00000004"
    for checkpoint in (older, named):
        checkpoint.mkdir()
    (older / MANIFEST).touch()
    threading.Timer(0.5, (named / MANIFEST).touch).start()
    assert _awaited(named) == named
    assert (named / MANIFEST).exists()


def test_a_checkpoint_that_stays_invisible_ends_the_rank_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchbox.worker.training.VISIBLE_AFTER_S", 0.2)
    with pytest.raises(DataError, match="step-00000004: is not visible on this machine; all nodes must share the folder"):
        _awaited(tmp_path / "step-00000004")
