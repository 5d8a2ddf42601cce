"""Saying where a rank is, at every stage and every step; the heartbeat fills in the phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchbox.measure.phases import Position
    from benchbox.store.events import EventWriter


class Reporter:
    """Moves the position and writes the event in one go."""

    def __init__(self, position: Position, events: EventWriter) -> None:
        self.position = position
        self._events = events

    def stage(self, name: str, of: int | None = None) -> None:
        """Enter a stage of `of` steps."""
        self.position.enter(name, of)
        self.said()

    def said(self) -> None:
        """Write where the rank is now; called after each step, outside of what is timed."""
        stage, step, of, phase, _ = self.position.state
        self._events.write("progress", stage=stage, step=step, of=of, phase=phase)
