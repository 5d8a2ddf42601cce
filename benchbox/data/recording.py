"""Recording demonstrations in Meta-World: MuJoCo physics, scripted experts, any of the simulator's cameras."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchbox.data.writer import LeRobotWriter
from benchbox.errors import ConfigurationError, DataError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SUITE = "metaworld"
TRIES = 4  # attempts for every episode wanted, before giving a task up
SHADOW_PIXELS = 1024  # of the shadow map; MuJoCo's 4096 is most of the time of rendering in software
GOALS = 50  # positions of object and goal that Meta-World draws for a seed


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the expert: kept when it solved the task."""

    env: str
    kept: int
    discarded: int
    frames: int
    solved: bool


def record(
    root: Path,
    *,
    envs: Sequence[str],
    episodes: int,
    cameras: Sequence[str],
    size: int,
    every: int = 1,
    seed: int = 0,
    report: Callable[[Attempt], None] = lambda _: None,
) -> None:
    """Record `episodes` solved episodes of every environment, each ending when its task is solved, into a new dataset.

    `envs` are names like "metaworld/reach-v3", one task each; images are `size` pixels square; an action is held for `every`
    control steps of 1/80 s, which makes the dataset 80 / `every` frames a second and still one that can be replayed.
    `report` hears of every attempt, also of those that failed and were discarded.

    Raises:
        ConfigurationError: unknown environment or camera, an extra or a system library missing.
        DataError: the expert solves the task too rarely, or `root` exists.
    """
    simulators = [_Simulator(_env_name(env), cameras, size, every, seed) for env in envs]
    fps = simulators[0].fps
    features = {
        "observation.state": {"dtype": "float32", "shape": [4], "names": ["x", "y", "z", "gripper"]},
        "action": {"dtype": "float32", "shape": [4], "names": ["dx", "dy", "dz", "gripper"]},
    }
    for camera in cameras:
        shape = [size, size, 3]
        features[f"observation.images.{camera}"] = {"dtype": "video", "shape": shape, "names": ["height", "width", "channels"]}
    with LeRobotWriter(root, fps=fps, features=features, robot_type="sawyer") as writer:
        for simulator in simulators:
            with simulator:
                _record_task(simulator, writer, episodes, report)


def _record_task(simulator: _Simulator, writer: LeRobotWriter, episodes: int, report: Callable[[Attempt], None]) -> None:
    kept = discarded = 0
    while kept < episodes:
        tried = kept + discarded
        if tried == TRIES * episodes:
            raise DataError(f"{simulator.name}: the expert solved {kept} of {tried} attempts, and {episodes} are wanted")
        frames, solved = simulator.attempt(tried, writer)
        if solved:
            writer.end_episode()
            kept += 1
        else:
            writer.discard_episode()
            discarded += 1
        report(Attempt(simulator.name, kept, discarded, frames, solved))


class _Simulator:
    """One environment of Meta-World with its expert; as a context, with a renderer too."""

    def __init__(self, name: str, cameras: Sequence[str], size: int, every: int, seed: int) -> None:
        self._metaworld, self._mujoco, experts = _import_simulator()
        if name not in experts:
            raise ConfigurationError(Problem("", f"Meta-World has no environment {name!r}", did_you_mean(name, experts)))
        self.name = name
        self.task = name.rpartition("-v")[0].replace("-", " ")
        self._cameras = cameras
        self._size = size
        self._every = every
        self._seed = seed
        self._benchmark = self._metaworld.MT1(name, seed=seed)
        self._env = self._benchmark.train_classes[name]()
        self._expert = experts[name]()
        rate = round(1 / self._env.dt)
        if rate % every:
            raise ConfigurationError(
                f"an action held for {every} of the {rate} control steps of a second gives no whole number of frames a second"
            )
        self.fps = rate // every
        known = [self._env.model.camera(i).name for i in range(self._env.model.ncam)]
        for camera in cameras:
            if camera not in known:
                raise ConfigurationError(Problem("", f"{name} has no camera {camera!r}", did_you_mean(camera, known)))

    def __enter__(self) -> Self:
        if not self._cameras:
            return self
        visual = self._env.model.vis
        visual.global_.offwidth = max(self._size, visual.global_.offwidth)
        visual.global_.offheight = max(self._size, visual.global_.offheight)
        visual.quality.shadowsize = SHADOW_PIXELS
        self._mujoco.Renderer._mjr_context = None  # noqa: SLF001  # its destructor reads this even where starting it failed
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the graphics library: what matters of them is in the error
                self._renderer = self._mujoco.Renderer(self._env.model, self._size, self._size)
        except Exception as error:  # what fails, and how, depends on the graphics library
            raise _no_graphics(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._cameras:
            self._renderer.close()

    def attempt(self, number: int, writer: LeRobotWriter) -> tuple[int, bool]:
        """Add the frames of one run of the expert: how many, and whether it solved the task."""
        seeded, goal = divmod(number, GOALS)
        if seeded and not goal:
            self._benchmark = self._metaworld.MT1(self.name, seed=self._seed + seeded)
        self._env.set_task(self._benchmark.train_tasks[goal])
        observation, _ = self._env.reset()
        frames, solved, over = 0, False, False
        while not (solved or over):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experts overshoot the action range, which is clipped below
                action = np.clip(self._expert.get_action(observation), -1, 1).astype(np.float32)
            frame = {"observation.state": observation[:4], "action": action}
            frame |= {f"observation.images.{camera}": self._image(camera) for camera in self._cameras}
            writer.add_frame(frame, task=self.task)
            frames += 1
            for _ in range(self._every):
                observation, _, _, over, info = self._env.step(action)
                solved = bool(info["success"])
                if solved or over:
                    break
        return frames, solved

    def _image(self, camera: str) -> np.ndarray:
        """What the camera sees now, (size, size, 3) uint8, the right way up."""
        self._renderer.update_scene(self._env.data, camera=camera)
        image: np.ndarray = self._renderer.render()
        view = self._env.data.camera(camera)
        fixed = self._env.model.camera(camera).mode[0] == 0
        # the corner cameras hang upside down: the world's z axis points down in their image
        return image[::-1, ::-1] if fixed and view.xmat.reshape(3, 3)[2, 1] < -0.1 else image


def _env_name(env: str) -> str:
    suite, slash, name = env.partition("/")
    if not slash or suite != SUITE:
        raise ConfigurationError(f"unknown environment {env!r}: names are like {SUITE}/reach-v3")
    return name


def _import_simulator() -> tuple[Any, Any, Any]:
    """(metaworld, mujoco, experts by environment). Chooses software rendering where there is no display."""
    if not {"MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        os.environ["MUJOCO_GL"] = "osmesa"  # read when mujoco is imported
    try:
        import metaworld
        import mujoco
        from metaworld.policies import ENV_POLICY_MAP
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"recording needs the extra `sim` ({error.name} is missing): pip install 'benchbox[sim]'"
        ) from None
    except Exception as error:  # mujoco's rendering backends fail at import in their own ways
        raise _no_graphics(error) from error
    return metaworld, mujoco, ENV_POLICY_MAP


def _no_graphics(error: Exception) -> ConfigurationError:
    chosen = os.environ.get("MUJOCO_GL", "the display")
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigurationError(
        f"cannot render with {chosen} ({reason}): install libosmesa6 (apt-get install libosmesa6) and set MUJOCO_GL=osmesa"
    )
