"""State of a rank, reconstructed from its events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchbox.registry.phases import RankState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(slots=True)
class Trace:
    """Summary of the events of one rank so far."""

    rank: int
    remote: bool = False  # on another host, whose monotonic clock and process ids are its own
    pid: int | None = None  # once it has started
    state: RankState | None = None
    last_event_at: float | None = None  # monotonic time of the last event of any kind
    final_event: str | None = None  # error | terminated | done
    stopped_after: int | None = None  # steps of a training that was asked to stop, once it has
    errors: list[Mapping[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    clock_lag_s: float = math.inf  # what to add to times of a remote rank: the least delay that was seen
    state_lag_s: float = 0.0  # what was added to the time of `state`

    def receive(self, event: Mapping[str, Any], at: float) -> bool:
        """Add one event that was read at the monotonic time `at` of this host; return whether it shows progress of the rank.

        The times of a remote rank are converted to the clock of this host, late by at most the time until they were read.
        """
        if self.remote:
            self.clock_lag_s = min(self.clock_lag_s, at - event["monotonic_s"])
            times = {key: event[key] + self.clock_lag_s for key in ("monotonic_s", "since") if key in event}
            event = {**event, **times}
        return self.update(event)

    def restate(self, state: RankState | None) -> None:
        """Replace the state by the one in the state file of the rank, if it has one that is not older.

        The file is written through memory, which NFS may show to another machine much later than the events.
        """
        if state is None or (self.state is not None and state.since + self.state_lag_s < self.state.since):
            return
        self.state = state._replace(since=state.since + self.clock_lag_s) if self.remote else state

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
                self.state, self.state_lag_s = state, self.clock_lag_s if self.remote else 0.0
            return progressed
        if kind == "warning":
            self.warnings.append(event["message"])
            return True
        if kind == "stopped":
            self.stopped_after = event["completed"]
        if kind == "error":
            self.errors.append(event)
        if kind in ("error", "terminated", "done"):
            # A rank that is terminated because another failed may raise while it ends: its first final event counts.
            self.final_event = self.final_event or kind
            return True
        return False


def furthest_behind(traces: Iterable[Trace]) -> RankState | None:
    """Return the state of the rank that is furthest behind; None before any rank has reported one."""
    return min((trace.state for trace in traces if trace.state), key=lambda state: state.order, default=None)
