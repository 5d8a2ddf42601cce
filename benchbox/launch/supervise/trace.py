"""State of a rank, reconstructed from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.registry.phases import RankState

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Trace:
    """Summary of the events of one rank so far."""

    rank: int
    pid: int | None = None  # once it has started
    state: RankState | None = None
    last_event_at: float | None = None  # monotonic time of the last event of any kind
    final_event: str | None = None  # error | terminated | done
    errors: list[Mapping[str, Any]] = field(default_factory=list)

    def update(self, event: Mapping[str, Any]) -> bool:
        """Add one event and return whether it shows progress of the rank."""
        kind = event["event"]
        self.last_event_at = event["monotonic_s"]
        if kind == "start":
            self.pid = event["pid"]
            return True
        if kind in ("progress", "heartbeat"):
            since = event.get("since", event["monotonic_s"])
            state = RankState(event["stage"], event.get("step"), event.get("of"), event.get("phase"), since)
            # Progress is a change of state: a heartbeat alone only shows that the process is alive.
            progressed = self.state is None or state[:4] != self.state[:4]
            if progressed:
                self.state = state
            return progressed
        if kind == "error":
            self.errors.append(event)
        if kind in ("error", "terminated", "done"):
            # A rank that is terminated because another failed may raise while it ends: its first final event counts.
            self.final_event = self.final_event or kind
            return True
        return False
