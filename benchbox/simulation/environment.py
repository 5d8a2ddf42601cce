"""The contract of an environment, and finding one by its name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from benchbox.errors import ConfigurationError, Problem, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

METAWORLD = "metaworld/"


class EnvironmentFrame(NamedTuple):
    """Inputs of a policy in one frame, in the units and sizes of the dataset that it was trained on."""

    state: np.ndarray  # (S,) float32
    images: dict[str, np.ndarray]  # (H, W, 3) uint8 RGB, by camera


class Environment(Protocol):
    """A task that a policy tries to solve. It lives in a process of its own, which builds it and never imports torch."""

    task: str  # the instruction, in the words of the dataset
    max_steps: int  # after which an episode ends

    def reset(self, seed: int) -> None:
        """Begin an episode, which depends on its seed only and not on the episodes before it."""

    def observe(self) -> EnvironmentFrame:
        """Return the current observation. It is called only where the policy or a video needs it: rendering takes time."""

    def step(self, action: np.ndarray) -> tuple[bool, bool]:
        """Execute an action (A,) float32 in raw units; return whether the task is solved and whether the episode is over."""

    def close(self) -> None:
        """Release renderers and files."""


if TYPE_CHECKING:
    Factory = Callable[[Sequence[str], tuple[int, int], float], Environment]  # of cameras, (H, W) in pixels, frames per second


def find_factory(name: str) -> Factory:
    """Return the factory of an environment: `metaworld/<task>`, or `module:attribute` for one of your own.

    A factory takes the names of cameras, the size (H, W) of images and the number of frames per second.

    Raises:
        ConfigurationError: there is no such environment.
    """
    if name.startswith(METAWORLD):
        from benchbox.simulation.metaworld import MetaWorld  # needs the extra `sim` once it is built

        return lambda cameras, size, fps: MetaWorld(name.removeprefix(METAWORLD), cameras, size, fps)
    module, colon, attribute = name.partition(":")
    if not colon:
        hint = "write metaworld/reach-v3, or module:factory"
        raise ConfigurationError(Problem("--env", f"unknown environment {name!r}", hint))
    try:
        factory: Factory = getattr(import_module(module), attribute)
    except Exception as error:  # noqa: BLE001 (a module of others may raise anything)
        message = f"{name}: {type(error).__name__}: {reason_of(error)}"
        raise ConfigurationError(Problem("--env", message, "it must be importable from this directory")) from None
    return factory
