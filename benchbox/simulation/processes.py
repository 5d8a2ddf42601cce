"""Environments in processes of their own, stepped side by side."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.errors import EXIT_CELL_FAILED, BenchboxError, ConfigurationError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy as np

    from benchbox.simulation.environment import Environment, EnvironmentFrame, Factory


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
            SimulationError: it failed, or its process ended.
        """
        try:
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
        connection.send((environment.task, environment.max_steps))
        while (message := connection.recv()) is not None:
            request, arguments = message
            connection.send(_reset(environment, *arguments) if request == "reset" else _execute(environment, *arguments))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the other end has ended
    except BenchboxError as error:
        connection.send(ConfigurationError(str(error)))
    except Exception as error:  # noqa: BLE001 (an environment of others may raise anything)
        connection.send(SimulationError(f"the environment failed: {type(error).__name__}: {error}"))
    finally:
        if environment is not None:
            environment.close()


def _reset(environment: Environment, seed: int) -> Advance:
    environment.reset(seed)
    return Advance([environment.observe()], steps=0)


def _execute(environment: Environment, actions: np.ndarray, every_frame: bool) -> Advance:
    observations: list[EnvironmentFrame] = []
    for steps, action in enumerate(actions, start=1):
        solved, over = environment.step(action)
        ends = solved or over or steps == len(actions)
        if every_frame or ends:
            observations.append(environment.observe())
        if ends:
            return Advance(observations, steps, solved, over)
    raise ValueError("no actions to execute")
