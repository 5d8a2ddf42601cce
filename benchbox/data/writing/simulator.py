"""Meta-World: MuJoCo physics, scripted experts, any of the simulator's cameras. Needs the extra `sim`."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchbox.errors import ConfigurationError, Problem, reason_of
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.data.writing.writer import LeRobotWriter

SHADOW_PIXELS = 1024  # of the shadow map; with MuJoCo's 4096 it takes most of the time of software rendering
GOALS_PER_SEED = 50  # positions of object and goal that Meta-World draws


class Simulator:
    """Environment of Meta-World with its expert. As a context manager it also has a renderer."""

    def __init__(self, name: str, cameras: Sequence[str], size: int, every: int, seed: int) -> None:
        self._metaworld, self._mujoco, experts = import_simulator()
        if name not in experts:
            raise ConfigurationError(Problem("", f"Meta-World has no environment {name!r}", did_you_mean(name, experts)))
        self.name = name
        self.task = name.rpartition("-v")[0].replace("-", " ")
        self._cameras = cameras
        self._size = size
        self._every = every
        self._seed = seed
        self._benchmark_seed = seed
        self._benchmark = self._metaworld.MT1(name, seed=seed)
        self._env = self._benchmark.train_classes[name]()
        self._expert = experts[name]()
        rate = round(1 / self._env.dt)
        if rate % every:
            raise ConfigurationError(
                f"holding an action for {every} of {rate} control steps a second gives no whole number of frames a second"
            )
        self.fps = rate // every
        available = [self._env.model.camera(i).name for i in range(self._env.model.ncam)]
        for camera in cameras:
            if camera not in available:
                raise ConfigurationError(Problem("", f"{name} has no camera {camera!r}", did_you_mean(camera, available)))

    def __enter__(self) -> Self:
        if not self._cameras:
            return self
        visual = self._env.model.vis
        visual.global_.offwidth = max(self._size, visual.global_.offwidth)
        visual.global_.offheight = max(self._size, visual.global_.offheight)
        visual.quality.shadowsize = SHADOW_PIXELS
        self._mujoco.Renderer._mjr_context = None  # noqa: SLF001  # the destructor reads it even if the constructor failed
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the graphics library: the error has the relevant information
                self._renderer = self._mujoco.Renderer(self._env.model, self._size, self._size)
        except Exception as error:  # the type of the error depends on the graphics library
            raise _graphics_error(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._cameras:
            self._renderer.close()

    def attempt(self, number: int, writer: LeRobotWriter) -> tuple[int, bool]:
        """Add the frames of a run of the expert, and return their number and whether the task was solved.

        A run depends on its number only, and not on the runs before it.
        """
        self.reset(number)
        frames, solved, truncated = 0, False, False
        while not (solved or truncated):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experts exceed the action range; actions are clipped below
                action = np.clip(self._expert.get_action(self._observation), -1, 1).astype(np.float32)
            writer.add_frame({**self.observe(), "action": action}, task=self.task)
            frames += 1
            solved, truncated = self.step(action)
        return frames, solved

    def reset(self, number: int) -> None:
        """Begin the episode of a number, which determines the positions of object and goal."""
        seed_offset, goal = divmod(number, GOALS_PER_SEED)
        if self._benchmark_seed != self._seed + seed_offset:
            self._benchmark_seed = self._seed + seed_offset
            self._benchmark = self._metaworld.MT1(self.name, seed=self._benchmark_seed)
        self._env.set_task(self._benchmark.train_tasks[goal])
        self._observation, _ = self._env.reset()

    def observe(self) -> dict[str, np.ndarray]:
        """Return the state (4,) and the image (size, size, 3) uint8 of every camera, by the names of their features."""
        images = {f"observation.images.{camera}": self._image(camera) for camera in self._cameras}
        return {"observation.state": self._observation[:4], **images}

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        """Repeat an action (4,) for `every` control steps; return whether the task is solved and whether the time is over."""
        solved = truncated = False
        for _ in range(self._every):
            self._observation, _, _, truncated, info = self._env.step(action)
            solved = bool(info["success"])
            if solved or truncated:
                break
        return solved, bool(truncated)

    def _image(self, camera: str) -> np.ndarray:
        """Render a camera, (size, size, 3) uint8, upright."""
        self._renderer.update_scene(self._env.data, camera=camera)
        image: np.ndarray = self._renderer.render()
        view = self._env.data.camera(camera)
        is_fixed = self._env.model.camera(camera).mode[0] == 0
        # The corner cameras are mounted upside down: the world's z axis points down in their image.
        return image[::-1, ::-1] if is_fixed and view.xmat.reshape(3, 3)[2, 1] < -0.1 else image


def import_simulator() -> tuple[Any, Any, Any]:
    """Return (metaworld, mujoco, experts by environment). Selects software rendering if there is no display."""
    if not {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ["MUJOCO_GL"] = "osmesa"  # read by mujoco at its import
    try:
        import metaworld
        import mujoco
        from metaworld.policies import ENV_POLICY_MAP
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Meta-World needs the extra `sim` ({error.name} is missing): pip install 'benchbox[sim]'"
        ) from None
    except Exception as error:  # the type of the error depends on mujoco's rendering backend
        raise _graphics_error(error) from error
    return metaworld, mujoco, ENV_POLICY_MAP


def _graphics_error(error: Exception) -> ConfigurationError:
    library = os.environ.get("MUJOCO_GL", "the display")
    return ConfigurationError(
        f"cannot render with {library} ({reason_of(error)}): "
        "install libosmesa6 (apt-get install libosmesa6) and set MUJOCO_GL=osmesa"
    )
