"""Stages of a launch and phases of a step, in the order in which a rank goes through them, and the state of a rank.

Shared by the ranks, which report their state, and the launcher, which finds the rank that is behind without importing torch.
"""

from __future__ import annotations

from typing import NamedTuple

CHECKPOINT = "checkpoint"  # the stage in which a training waits for the files of a checkpoint

STAGES = (
    "build",
    "compile_extension",
    "prepare",
    "warmup",
    "measure",
    "profile",
    "train",
    "validate",
    CHECKPOINT,
    "probe",
    "write",
)

MEASURED_STAGES = ("build", "compile_extension", "prepare", "warmup", "measure", "probe", "write")  # of a launch

PROBED_STEPS = 3  # of the stage `probe`: the minimum that shows a pinned weight

CHECKPOINT_LIMIT_S = 7200.0  # after which a rank no longer waits for the files of another one

# Timeout of collectives: above every limit of the launcher, which alone judges what is a hang. Those of torch (10 minutes of
# NCCL, 30 of gloo) would end ranks that may wait longer, and NCCL ends them by a signal, without an event or stacks. Torch's
# store counts milliseconds in 32 bits, which is 24 days.
GROUP_TIMEOUT_S = 7 * 86400.0

# Texts of the stages whose names do not say what takes so long.
STAGE_TEXTS = {"compile_extension": "compiling DeepSpeed's CPU extension, once per environment"}

COMPILATION = "torch.compile"  # in place of the phase in which a graph is compiled, in the state of a rank

PHASES = ("data_wait", "forward", "backward", "clip", "optimizer", "zero_grad", "sync", "average")

OUTSIDE_PHASES = "outside the phases"  # the part of a step that is in none of them

# Parts of a step of one rank. compute: its own work; core_wait: it was ready to run and had no core; rank_wait: it had arrived
# at a collective that another rank had not; transfer: all had arrived.
STEP_PARTS = ("data_wait", "compute", "core_wait", "rank_wait", "transfer")


class RankState(NamedTuple):
    """Current stage, step and phase of a rank, and since when (seconds of the host's monotonic clock)."""

    stage: str
    step: int | None
    of: int | None  # steps of the stage
    phase: str | None
    since: float

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: larger is further.

        Outside a phase sorts before every phase: a rank waits for others inside a phase, so one outside is not waiting but
        delayed by itself.
        """
        stage = STAGES.index(self.stage) if self.stage in STAGES else -1
        phase = PHASES.index(self.phase) if self.phase in PHASES else -1
        return stage, self.step or 0, phase

    def __str__(self) -> str:
        """Format as `measure step 3 of 10, forward`."""
        text = STAGE_TEXTS.get(self.stage, self.stage)
        if self.step is not None:
            text += f" step {self.step}" + (f" of {self.of}" if self.of is not None else "")
        return f"{text}, {self.phase}" if self.phase else text
