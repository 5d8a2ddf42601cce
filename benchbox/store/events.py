"""Append-only event files: a rank writes, the launcher reads while it runs. One JSON object a line."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.store.files import strict

if TYPE_CHECKING:
    from pathlib import Path


class EventWriter:
    """Writes one rank's events. Safe to share between threads: a line is a single append by the kernel."""

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._rank = rank

    def write(self, event: str, **fields: Any) -> None:
        """Append `{"t": now, "rank": r, "event": event, **fields}`; what JSON cannot hold is written as text."""
        line = json.dumps({"t": time.time(), "rank": self._rank, "event": event, **strict(fields)}, default=str)
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


def read_events(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Events written since `offset` (bytes), and the offset to continue from.

    A file that does not exist yet has no events. A last line without its newline is still being written: it is left for the
    next call.

    Raises:
        RecordError: a finished line is not an event.
    """
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            text = stream.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    events = []
    position = offset
    for line in whole.splitlines(keepends=True):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            raise RecordError(f"{path}: the line at byte {position} is not an event")
        events.append(event)
        position += len(line)
    return events, position
