"""Append-only event files: a rank writes, the launcher reads while the rank runs. One JSON object per line."""

from __future__ import annotations

import errno
import json
import os
import time
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict, cast

from benchbox.errors import RecordError
from benchbox.store.files import complete_lines, replace_non_finite

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _EventFields(TypedDict, total=False):
    """Fields that only some kinds of events have."""

    pid: int  # start
    stage: str | None  # progress, heartbeat, error
    step: int | None
    of: int | None  # steps of the stage
    phase: str | None
    since: float  # heartbeat: when this state was entered, by the monotonic clock
    status: str  # error: one of STATUSES
    type: str  # error: class name of the exception
    message: str  # error, warning
    traceback: str
    secondary: bool  # error: a collective failed, probably because another rank did
    signal: str  # terminated, stopped
    completed: int  # stopped: steps of the training


class RankEvent(_EventFields):
    """One line of a rank's event file. `event` is start, progress, heartbeat, warning, stopped, error, terminated or done."""

    t: float  # unix time
    monotonic_s: float  # of the host: durations and order are computed from it, since `t` may jump
    rank: int
    event: str


class EventWriter:
    """Writer of one rank's events, which threads may share."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rank = rank
        self._lock = Lock()
        self._finished = False

    def write(self, event: str, **fields: Any) -> None:
        """Append `{"t": now, "monotonic_s": ..., "rank": r, "event": event, **fields}`; what JSON cannot represent is text.

        Nothing is written after the last event.

        Raises:
            OSError: the line cannot be written. No part of it is in the file.
        """
        self._write(event, fields, is_last=False)

    def write_last(self, event: str) -> None:
        """Append the last event: what other threads write later is dropped.

        Raises:
            OSError: the line cannot be written, and events that follow still can.
        """
        self._write(event, {}, is_last=True)

    def _write(self, event: str, fields: Mapping[str, Any], *, is_last: bool) -> None:
        common = {"t": time.time(), "monotonic_s": time.monotonic(), "rank": self._rank, "event": event}
        line = json.dumps({**common, **replace_non_finite(fields)}, default=str).encode() + b"\n"
        with self._lock:
            if self._finished:
                return
            if (written := os.write(self._descriptor, line)) < len(line):  # a full disk takes a part of it
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._finished = is_last

    def close(self) -> None:
        os.close(self._descriptor)


def read_events(path: Path, offset: int = 0) -> tuple[list[RankEvent], int]:
    """Return the events written since `offset` (bytes), and the offset to continue from.

    A file that does not exist yet has no events. A final line without its newline is still being written and is left for the
    next call.

    Raises:
        RecordError: a finished line is not an event.
    """
    events: list[RankEvent] = []
    position = offset
    for line in complete_lines(path, offset):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            raise RecordError(f"{path}: the line at byte {position} is not an event")
        events.append(cast("RankEvent", event))
        position += len(line)
    return events, position
