"""Environments in processes of their own, stepped side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchbox.errors import EXIT_CELL_FAILED, BenchboxError, ConfigurationError, reason_of
from benchbox.simulation.environment import EnvironmentFrame

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from benchbox.simulation.environment import Environment, Factory

ANSWER_LIMIT_S = 1800.0  # after which an environment is taken to hang


class SimulationError(BenchboxError):
    """An environment failed while an episode ran."""

    exit_code = EXIT_CELL_FAILED


@dataclass(frozen=True, slots=True)
class Advance:
    """An episode after some of its actions: the observations since then, the last one last."""

    observations: list[EnvironmentFrame]
    steps: int  # executed now
    solved: bool = False
    over: bool = False


class EnvironmentProcess:
    """An environment in a forked process. Close it.

    Args:
        factory: builds the environment, in the new process.
        cameras, size, fps: arguments of the factory.

    Raises:
        ConfigurationError: the environment cannot be built.
    """

    def __init__(self, factory: Factory, cameras: tuple[str, ...], size: tuple[int, int], fps: float) -> None:
        context = multiprocessing.get_context("fork")  # a factory need not be picklable, and nothing is imported again
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._connection, theirs, factory, cameras, size, fps), daemon=True
        )
        self._process.start()
        theirs.close()
        self.task, self.max_steps = self.receive()

    def begin_reset(self, seed: int) -> None:
        """Begin an episode; `receive` returns its first observation, or raises if the process has ended."""
        self._send(("reset", (seed,)))

    def begin_execution(self, actions: np.ndarray, *, every_frame: bool) -> None:
        """Execute actions (N, A) until the episode is over; `receive` returns the progress.

        Args:
            every_frame: whether each frame is observed, and not only the last one.
        """
        self._send(("execute", (actions, every_frame)))

    def _send(self, message: tuple[str, tuple[Any, ...]]) -> None:
        with suppress(OSError):  # the process has ended: `receive` says how
            self._connection.send(message)

    def receive(self) -> Any:
        """Return the result of what was begun.

        Raises:
            ConfigurationError: the environment cannot do it, such as one with an unknown name.
            SimulationError: it failed, its process ended, or it does not answer.
        """
        try:
            if not self._connection.poll(ANSWER_LIMIT_S):
                raise SimulationError(f"the environment has not answered for {ANSWER_LIMIT_S:g} s")
            result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            message = f"the process of the environment ended with exit code {self._process.exitcode}"
            raise SimulationError(message) from None
        if isinstance(result, BenchboxError):
            raise result
        return result

    def close(self) -> None:
        """End the process.

        It is asked to end: processes that were forked later hold this end of the connection, which is therefore not at its end.
        """
        with suppress(OSError):  # it has ended
            self._connection.send(None)
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    inherited: Connection, connection: Connection, factory: Factory, cameras: tuple[str, ...], size: tuple[int, int], fps: float
) -> None:
    """Build an environment and serve requests until there are no more."""
    inherited.close()  # or this process would not notice that the other one was killed
    environment = None
    try:
        environment = factory(cameras, size, fps)
        connection.send(_describe(environment))
        while (message := connection.recv()) is not None:
            request, arguments = message
            connection.send(_reset(environment, *arguments) if request == "reset" else _execute(environment, *arguments))
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 (an environment of others may raise anything, also what a broken pipe raises)
        failure = f"the environment failed: {type(error).__name__}: {reason_of(error)}"
        with suppress(OSError):  # the other end has ended
            connection.send(ConfigurationError(str(error)) if isinstance(error, BenchboxError) else SimulationError(failure))
    finally:
        if environment is not None:
            with suppress(Exception):  # what it holds ends with this process
                environment.close()


def _describe(environment: Environment) -> tuple[str, int]:
    """Return the task and the most steps of an environment."""
    if not isinstance(environment.task, str):
        raise TypeError(f"its task is {environment.task!r}, and not a text")
    steps = int(environment.max_steps)
    if steps < 1 or steps != environment.max_steps:
        raise ValueError(f"its max_steps is {environment.max_steps!r}, and not a number of steps")
    return environment.task, steps


def _reset(environment: Environment, seed: int) -> Advance:
    environment.reset(seed)
    return Advance([_observe(environment)], steps=0)


def _execute(environment: Environment, actions: np.ndarray, every_frame: bool) -> Advance:
    observations: list[EnvironmentFrame] = []
    for steps, action in enumerate(actions, start=1):
        solved, over = environment.step(action)
        ends = solved or over or steps == len(actions)
        if every_frame or ends:
            observations.append(_observe(environment))
        if ends:
            return Advance(observations, steps, _truth("solved", solved), _truth("over", over))
    raise ValueError("no actions to execute")


def _truth(name: str, value: Any) -> bool:
    """Return a flag of a step, also one of NumPy's types or a number. A reward in its place, or NaN, would count as true."""
    if value != 0 and value != 1:
        raise ValueError(f"the step returns {value!r} as {name}, which is neither true nor false")
    return bool(value)


def _observe(environment: Environment) -> EnvironmentFrame:
    """Return the current observation, its state in the dtype in which datasets are read."""
    frame = environment.observe()
    state = np.asarray(frame.state, np.float32)
    if not isinstance(frame.images, Mapping):
        raise TypeError(f"the images of its observation are {type(frame.images).__name__}, and not a mapping by camera")
    return EnvironmentFrame(state, frame.images)
