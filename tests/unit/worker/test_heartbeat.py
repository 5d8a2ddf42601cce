"""Heartbeats of a rank."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from benchbox.measure.phases import ProgressTracker
from benchbox.worker import rank

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class FullDisk:
    """Events that cannot be written at first."""

    def __init__(self) -> None:
        self.attempts = 0
        self.written = threading.Event()

    def write(self, event: str, **_: Any) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise OSError
        assert event == "heartbeat"
        self.written.set()


def test_a_full_disk_does_not_end_the_heartbeats_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look like one that has stopped, and be blamed for the hang of another."""
    monkeypatch.setattr(rank, "_HEARTBEAT_S", 0.05)
    events: Any = FullDisk()
    with (tmp_path / "stack").open("w") as stack:
        rank._start_heartbeat(ProgressTracker(), events, os.dup(stack.fileno()), tmp_path / "collectives.json")
    assert events.written.wait(30)
