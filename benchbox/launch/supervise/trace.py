"""Where a rank stands, folded from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.registry.phases import RankState

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Trace:
    """What is known of one rank from its events so far."""

    rank: int
    pid: int | None = None  # once it has started
    state: RankState | None = None
    last_seen: float | None = None  # unix time of the last event of any kind
    ended: str | None = None  # error | terminated | done: the rank's last word
    errors: list[Mapping[str, Any]] = field(default_factory=list)

    def fold(self, event: Mapping[str, Any]) -> bool:
        """Take in one event. Returns whether the rank moved."""
        kind = event["event"]
        self.last_seen = event["t"]
        if kind == "start":
            self.pid = event["pid"]
            return True
        if kind in ("progress", "heartbeat"):
            since = event.get("since", event["t"])
            state = RankState(event["stage"], event.get("step"), event.get("of"), event.get("phase"), since)
            # Only going somewhere else is progress: a heartbeat alone says that a process breathes.
            moved = self.state is None or state[:4] != self.state[:4]
            if moved:
                self.state = state
            return moved
        if kind == "error":
            self.errors.append(event)
        if kind in ("error", "terminated", "done"):
            # A rank told to stop because another failed may stumble on its way out; what it said first is what happened.
            self.ended = self.ended or kind
            return True
        return False
