"""The parts of a launch and of a step, in the order in which a rank goes through them.

Shared by those who report where a rank stands and those who judge, from outside and without torch, which rank is behind.
"""

from __future__ import annotations

STAGES = ("build", "prepare", "warmup", "measure", "train", "probe", "write")

PHASES = ("data_wait", "forward", "backward", "clip", "optimizer", "zero_grad", "sync")
