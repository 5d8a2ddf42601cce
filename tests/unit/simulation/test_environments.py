"""Environments by name, and the processes that they run in."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchbox.errors import ConfigurationError
from benchbox.simulation.environment import find_factory
from benchbox.simulation.metaworld import MetaWorld
from benchbox.simulation.processes import EnvironmentProcess, SimulationError
from tests.support.toy_environment import (
    ToyEnvironment,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    "name", ["reach-v3", "tests.support.toy_environment:Missing", "no_such_module:factory", ":factory", ".toys:factory"]
)
def test_an_unknown_environment_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^--env: .*{re.escape(name.partition(':')[0])}"):
        find_factory(name)


def test_a_module_of_an_environment_that_fails_at_its_import_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_environment.py").write_text("def factory(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"^--env: broken_environment:factory: SyntaxError: [^\n]*$"):
        find_factory("broken_environment:factory")


def test_an_environment_that_was_killed_is_reported_in_one_line() -> None:
    with closing(EnvironmentProcess(ToyEnvironment, (), (8, 8), 10.0)) as environment:
        environment._process.kill()
        environment._process.join()
        environment.begin_reset(0)
        with pytest.raises(SimulationError, match="the process of the environment ended with exit code -9"):
            environment.receive()


def test_environments_end_by_themselves_when_they_are_closed_in_any_order() -> None:
    """The second was forked while the connection of the first was open, and holds its end of it."""
    environments = [EnvironmentProcess(ToyEnvironment, (), (8, 8), 10.0) for _ in range(2)]
    for environment in environments:
        environment.close()
    assert [environment._process.exitcode for environment in environments] == [0, 0], "killed ones have -9"


def test_an_environment_that_cannot_be_closed_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    class Unclosable(ToyEnvironment):
        def close(self) -> None:
            raise RuntimeError("the renderer is gone")

    EnvironmentProcess(Unclosable, (), (8, 8), 10.0).close()
    assert capfd.readouterr().err == ""


def test_environments_end_with_the_process_that_opened_them() -> None:
    """Also if it was killed, as when the memory of the host ends."""
    script = """
import time
from benchbox.simulation.processes import EnvironmentProcess
from tests.support.toy_environment import ToyEnvironment
environments = [EnvironmentProcess(ToyEnvironment, (), (8, 8), 10.0) for _ in range(2)]
print(*(environment._process.pid for environment in environments), flush=True)
time.sleep(600)
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as evaluation:
        assert evaluation.stdout is not None
        environments = [psutil.Process(int(pid)) for pid in evaluation.stdout.readline().split()]
        evaluation.kill()
    _, left = psutil.wait_procs(environments, timeout=30)
    for environment in left:
        environment.kill()
    assert (len(environments), left) == (2, [])


class StandInSimulator:
    """Meta-World's simulator without Meta-World: it has the seed of its goals."""

    task = "reach"

    def __init__(self, name: str, cameras: Sequence[str], size: int, every: int, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        pass


def test_goals_of_an_evaluation_are_none_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """`data record` begins at seed 0, and counts up."""
    monkeypatch.setattr("benchbox.simulation.metaworld.Simulator", StandInSimulator)
    simulator: Any = MetaWorld("reach-v3", (), (64, 64), 40.0)._simulator
    assert simulator.seed >= 1_000_000
