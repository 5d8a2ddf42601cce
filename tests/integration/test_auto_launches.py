"""`--launches auto` by real launches: walks to the largest batch, then rounds until their pair is settled, in two commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.analysis.sequential import look_at
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.predictions import predicting_in_this_process
from tests.support.waiting_policy import write_waiting_policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True, scope="module")
def _predicting_in_this_process() -> Iterator[None]:
    with predicting_in_this_process():
        yield


MATRIX = """
name: auto
policy: waiting
backend: single
world_size: 1
data: synthetic
recipe: fp32
axes:
  size: [fast, slow]
  batch: {search: max, start: 2, at_most: 2}
measure: {warmup_steps: 3, steps: 2, launches: 1, memory_limit: 64 MiB}
reference: {size: fast}
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, str, str]:
    """Return the run directory, and the output of a command without time and of the one that continues it."""
    folder = tmp_path_factory.mktemp("auto")
    (folder / "auto.yaml").write_text(MATRIX)
    policies = write_waiting_policy(folder, fast=0.05, slow=0.2)
    command = ["run", folder / "auto.yaml", "--out", folder / "run", "--policy-dir", policies]
    outputs = []
    for budget in ("0.001s", "10m"):
        done = run_in_process(*command, "--launches", "auto", "--budget", budget, "--resolution", "5%")
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    return RunStore(folder / "run"), outputs[0], outputs[1]


def test_without_time_nothing_is_launched_and_the_same_command_continues(commands: tuple[RunStore, str, str]) -> None:
    store, first, _ = commands
    assert "the budget ended" in first
    assert "#1 ok" not in first
    assert len(list(store.records())) > 2


def test_the_pair_of_the_walks_is_settled_at_a_look(commands: tuple[RunStore, str, str]) -> None:
    store, _, output = commands
    run = store.run()
    assert run.sequential is not None
    assert run.sequential["resolution"] == 0.05
    assert "look 1 of 6, after launch 8: 1 of 1 pairs settled" in output
    assert "settled: size=slow batch=2: 0." in output
    assert "stopped: every pair that can be compared is settled" in output
    (pair,) = look_at(run, store.records()).settled
    assert pair.effect is not None
    assert (pair.verdict, pair.effect.launches) == ("regression", (7, 7))
    assert set(run.planned_launches().values()) == {8}


def test_every_invariant_holds(commands: tuple[RunStore, str, str]) -> None:
    assert verify_run(commands[0]).violations == ()


def test_a_budget_that_ends_among_cells_beside_the_walks_leaves_a_run(tmp_path: Path) -> None:
    (tmp_path / "auto.yaml").write_text(f"{MATRIX}include:\n  - {{size: slow, batch: 1, seed: 1}}\n")
    policies = write_waiting_policy(tmp_path, fast=0.05, slow=0.2)
    command = ["run", tmp_path / "auto.yaml", "--out", tmp_path / "run", "--policy-dir", policies, "--no-estimate"]
    done = run_in_process(*command, "--launches", "auto", "--budget", "0.001s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the budget ended with 1 launch left" in done.stdout
    assert {cell["batch"] for cell in RunStore(tmp_path / "run").run().cells.values()} == {1, 2}
