"""An environment without physics: its state is the sum of the actions, and its task is solved after some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchbox.simulation.environment import EnvironmentFrame

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STEPS = 12


class ToyEnvironment:
    """Solved after 3 actions plus one per seed, which episodes of a seed above 8 do not reach. State and action are (4,)."""

    task = "add"
    max_steps = MAX_STEPS

    def __init__(self, cameras: Sequence[str], size: tuple[int, int], fps: float) -> None:
        self._cameras, self._size = cameras, size

    def reset(self, seed: int) -> None:
        self._state, self._steps, self._seed = np.full(4, seed / 10, np.float32), 0, seed

    def observe(self) -> EnvironmentFrame:
        # The first pixels are the state, so that a filmed episode shows every action that was executed.
        image = np.zeros((*self._size, 3), np.uint8)
        image.reshape(-1)[:16] = np.frombuffer(self._state.tobytes(), np.uint8)
        return EnvironmentFrame(self._state, dict.fromkeys(self._cameras, image))

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        self._state, self._steps = self._state + action, self._steps + 1
        return self._steps >= 3 + self._seed, self._steps >= MAX_STEPS

    def close(self) -> None:
        pass


class FailingEnvironment(ToyEnvironment):
    """Fails at the first action of an episode, from seed 2 on."""

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        if self._seed < 2:
            return super().step(action)
        raise ValueError(f"no action like {len(action)} numbers")


class DivergingEnvironment(ToyEnvironment):
    """Has a state that is not finite after its second action."""

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        result = super().step(action)
        if self._steps == 2:
            self._state = np.array([0, 0, np.nan, 0], np.float32)
        return result


class UnequalEnvironment(ToyEnvironment):
    """Has images of 16 x 20 pixels of every camera but the first, whatever it is asked for."""

    def observe(self) -> EnvironmentFrame:
        frame = super().observe()
        return frame._replace(images=frame.images | dict.fromkeys(self._cameras[1:], np.zeros((16, 20, 3), np.uint8)))


class GymEnvironment(ToyEnvironment):
    """Returns numbers in the types of Gymnasium: float64 states, NumPy's booleans, and whether it is solved as a float."""

    max_steps = np.int64(MAX_STEPS)  # type: ignore[assignment]

    def observe(self) -> EnvironmentFrame:
        frame = super().observe()
        return frame._replace(state=frame.state.astype(np.float64) + 1e-9)

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        solved, over = super().step(action)
        return np.float32(solved), np.bool_(over)  # type: ignore[return-value]
