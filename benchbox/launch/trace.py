"""Where a rank stands, folded from its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from benchbox.registry.phases import PHASES, STAGES

if TYPE_CHECKING:
    from collections.abc import Mapping


class Place(NamedTuple):
    """A point on a rank's way. Only a change of it is progress: a heartbeat alone says that a process breathes."""

    stage: str
    step: int | None
    of: int | None
    phase: str | None

    @property
    def order(self) -> tuple[int, int, int]:
        """Larger is further.

        Between phases counts as before them: a rank waits for others inside a phase, so one that stands outside is not waiting
        but held up by itself.
        """
        stage = STAGES.index(self.stage) if self.stage in STAGES else -1
        phase = PHASES.index(self.phase) if self.phase in PHASES else -1
        return stage, self.step or 0, phase

    def __str__(self) -> str:
        step = f" step {self.step}" if self.step is not None else ""
        of = f" of {self.of}" if step and self.of is not None else ""
        return f"{self.stage}{step}{of}" + (f", {self.phase}" if self.phase else "")


@dataclass(slots=True)
class Trace:
    """What is known of one rank from its events so far."""

    rank: int
    started: bool = False
    place: Place | None = None
    since: float | None = None  # unix time at which `place` was reached
    last_seen: float | None = None  # unix time of the last event of any kind
    ended: str | None = None  # error | terminated | done: the rank's last word
    errors: list[Mapping[str, Any]] = field(default_factory=list)

    def fold(self, event: Mapping[str, Any]) -> bool:
        """Take in one event. Returns whether the rank moved."""
        kind = event["event"]
        self.last_seen = event.get("t")
        self.started = True
        if kind in ("progress", "heartbeat"):
            place = Place(event["stage"], event.get("step"), event.get("of"), event.get("phase"))
            moved = place != self.place
            if moved:
                self.place = place
                self.since = event.get("since") or event.get("t")
            return moved
        if kind == "error":
            self.errors.append(event)
        if kind in ("error", "terminated", "done"):
            # A rank told to stop because another failed may stumble on its way out; what it said first is what happened.
            self.ended = self.ended or kind
            return True
        return bool(kind == "start")
