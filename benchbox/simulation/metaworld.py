"""Tasks of Meta-World as environments. Needs the extra `sim`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.writing.simulator import Simulator
from benchbox.errors import ConfigurationError
from benchbox.simulation.environment import EnvironmentFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTROL_RATE = 80  # steps per second
MAX_CONTROL_STEPS = 500  # after which Meta-World ends an episode
# Goals of a seed are drawn like those of `data record` with this seed and later ones: other goals than those of demonstrations.
GOAL_SEED = 1_000_000
PREFIX = "observation.images."


class MetaWorld:
    """A task of Meta-World, seen by the simulator that recorded the demonstrations.

    Raises:
        ConfigurationError: there is no such task or camera, the frame rate or the size does not fit, or the extra is missing.
    """

    def __init__(self, name: str, cameras: Sequence[str], size: tuple[int, int], fps: float) -> None:
        if size[0] != size[1]:
            raise ConfigurationError(f"images are {size[0]} x {size[1]} pixels, and the recorder renders square ones")
        every = round(CONTROL_RATE / fps)
        if every < 1 or every * fps != CONTROL_RATE:
            raise ConfigurationError(f"the dataset has {fps:g} frames/s, which do not divide the {CONTROL_RATE} of Meta-World")
        self._simulator = Simulator(name, cameras, size[0], every, GOAL_SEED)
        self._simulator.__enter__()
        self.task = self._simulator.task
        self.max_steps = -(-MAX_CONTROL_STEPS // every)

    def reset(self, seed: int) -> None:
        self._simulator.reset(seed)

    def observe(self) -> EnvironmentFrame:
        frame = self._simulator.observe()
        state = frame.pop("observation.state").astype(np.float32)
        return EnvironmentFrame(state, {name.removeprefix(PREFIX): image for name, image in frame.items()})

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        return self._simulator.step(np.clip(action, -1, 1))

    def close(self) -> None:
        self._simulator.__exit__()
