"""The parts of a launch and of a step, in the order in which a rank goes through them, and a rank's place among them.

Shared by those who report where a rank stands and those who judge, from outside and without torch, which rank is behind.
"""

from __future__ import annotations

from typing import NamedTuple

STAGES = ("build", "prepare", "warmup", "measure", "train", "probe", "write")

PHASES = ("data_wait", "forward", "backward", "clip", "optimizer", "zero_grad", "sync")


class RankState(NamedTuple):
    """Where a rank stands, and since when (unix time in seconds)."""

    stage: str
    step: int | None
    of: int | None
    phase: str | None
    since: float

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
        """`measure step 3 of 10, forward`."""
        text = self.stage
        if self.step is not None:
            text += f" step {self.step}" + (f" of {self.of}" if self.of is not None else "")
        return f"{text}, {self.phase}" if self.phase else text
