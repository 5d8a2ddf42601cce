"""A matrix of one policy that fails in every way and one that does not, run by the real command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import psutil
import pytest

from tests.support.commands import run_in_process

POLICIES = Path(__file__).parent / "policies"
MATRIX = """\
name: faults
policy: faulty
backend: ddp
recipe: fp32
world_size: 2
batch: 2
data: synthetic
axes:
  size: [raises, killed, segfaults, exits, sleeps, out_of_memory, not_a_number, branches, healthy]
measure: {warmup_steps: 1, steps: 3, launches: 1, hang_after_s: 10, timeout_s: 240}
"""

# One cell takes longer than the time limit, the other asks for parameters to be frozen that this policy does not have.
LIMITS_MATRIX = """\
name: limits
policy: faulty
backend: single
recipe: fp32
world_size: 1
batch: 2
data: synthetic
axes:
  cell:
    - {size: slow, freeze: full}
    - {size: healthy, freeze: freeze_vision}
measure: {warmup_steps: 20, steps: 3, launches: 1, timeout_s: 15}
"""

MEMORY_MATRIX = """\
name: limit
policy: pi05
size: tiny
backend: single
recipe: fp32
world_size: 1
data: synthetic
axes:
  batch: [1, 64]
measure: {warmup_steps: 3, steps: 2, launches: 1, memory_limit: 16 MiB}
"""

pytestmark = pytest.mark.ranks


def command(matrix: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "benchbox.cli.app", "run", str(matrix), "--policy-dir", str(POLICIES), *options]


def benchbox_run(matrix: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(*command(matrix, *options)[3:], cwd=matrix.parent)


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return records by size and seed of the cell, such as `healthy 0`."""
    values = (json.loads(path.read_text()) for path in folder.glob("cells/*/launch-1.json"))
    return {f"{record['cell']['size']} {record['cell']['seed']}": record for record in values}


def survivors(folder: Path) -> list[str]:
    """Return the command lines of processes that launches of this run started, even if their parents have died."""
    alive = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("BENCHBOX_JOB", "").startswith(str(folder)):
                alive.append(" ".join(process.cmdline()))
    return alive


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.yaml").write_text(MATRIX)
    return folder, benchbox_run(folder / "faults.yaml")


def test_every_fault_is_typed_with_its_rank_and_phase_and_the_other_cell_finishes(faults: Any) -> None:
    folder, done = faults
    expected = {
        "raises 0": ("crash", "RuntimeError", 1, "forward"),
        "killed 0": ("crash", "Killed", 1, "forward"),
        "segfaults 0": ("crash", "Killed", 1, "forward"),
        "exits 0": ("crash", "ExitError", 1, "forward"),
        "sleeps 0": ("hang", "Hang", 1, "forward"),
        "out_of_memory 0": ("oom", "RuntimeError", 0, "forward"),
        "not_a_number 0": ("nan", "NonFiniteError", ANY, None),  # both ranks have the loss of all: either is first
        "branches 0": ("desync", "DesyncError", None, None),
        "healthy 0": ("ok", None, None, None),
    }
    outcomes = {
        name: (record["status"], *((record["error"] or {}).get(key) for key in ("type", "rank", "phase")))
        for name, record in records(folder / "runs" / "faults").items()
    }
    assert outcomes == expected, done.stdout + done.stderr
    assert done.returncode == 3
    assert done.stderr.startswith("error: 8 of 9 cells did not end ok")
    assert survivors(folder) == []


@pytest.mark.parametrize(("size", "phrase"), [("segfaults", "SIGSEGV"), ("exits", "with exit code 3")])
def test_a_rank_that_dies_is_named_and_not_the_one_whose_collective_broke(faults: Any, size: str, phrase: str) -> None:
    """Gloo raises a RuntimeError there."""
    folder, _ = faults
    error = records(folder / "runs" / "faults")[f"{size} 0"]["error"]
    assert phrase in error["message"]
    assert "without reporting an error" in error["message"]


def test_a_hang_is_recorded_with_the_line_the_rank_stood_in(faults: Any) -> None:
    folder, _ = faults
    assert "policy.py" in records(folder / "runs" / "faults")["sleeps 0"]["error"]["traceback"]


def test_an_out_of_memory_is_a_failed_allocation_of_the_system(faults: Any) -> None:
    folder, _ = faults
    error = records(folder / "runs" / "faults")["out_of_memory 0"]["error"]
    assert "DefaultCPUAllocator: can't allocate memory" in error["message"]
    assert "activations.append" in error["traceback"]
    assert 'File "benchbox/session/step.py"' in error["traceback"]


def test_a_desync_names_the_collective_of_every_rank_its_stack_and_the_calls_before(faults: Any) -> None:
    folder, _ = faults
    error = records(folder / "runs" / "faults")["branches 0"]["error"]
    first, second = error["ranks"]
    assert (first["collective"]["operation"], second["collective"]["operation"]) == ("all_reduce", "all_gather")
    assert first["collective"]["sequence"] == second["collective"]["sequence"]
    assert (first["phase"], second["phase"]) == ("backward", "forward")
    assert (first["collective"]["shapes"], second["collective"]["shapes"]) == ([[72]], [[16]])  # gradients of the layer; state
    assert "policy.py" in second["stack"]
    assert "all_gather_into_tensor" in second["stack"]
    assert "backward" in first["stack"]
    before = [[call["operation"] for call in position["last_collectives"][:-1]] for position in error["ranks"]]
    assert before[0] == before[1]
    assert len(before[0]) > 3
    assert "all_reduce(float32 [72]) on rank 0 and all_gather(float32 [16]) on rank 1" in error["message"]


def test_a_hang_says_in_which_collective_the_other_rank_waits(faults: Any) -> None:
    folder, _ = faults
    waiting, sleeping = records(folder / "runs" / "faults")["sleeps 0"]["error"]["ranks"]
    assert (waiting["collective"]["operation"], sleeping["collective"]) == ("all_reduce", None)
    assert "time.sleep(3600)" in sleeping["stack"]


def test_every_launch_leaves_one_plain_line_and_the_logs_of_its_ranks(faults: Any) -> None:
    folder, done = faults
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert [line.split()[:4] for line in lines] == [
        ["[1/9]", "size=raises", "#1", "crash"],
        ["[2/9]", "size=killed", "#1", "crash"],
        ["[3/9]", "size=segfaults", "#1", "crash"],
        ["[4/9]", "size=exits", "#1", "crash"],
        ["[5/9]", "size=sleeps", "#1", "hang"],
        ["[6/9]", "size=out_of_memory", "#1", "oom"],
        ["[7/9]", "size=not_a_number", "#1", "nan"],
        ["[8/9]", "size=branches", "#1", "desync"],
        ["[9/9]", "size=healthy", "#1", "ok"],
    ]
    assert "\x1b" not in done.stdout
    assert len(list((folder / "runs" / "faults").glob("cells/*/launch-1/rank[01].log"))) == 18


def test_a_second_run_keeps_what_is_ok_and_runs_the_failed_again(faults: Any) -> None:
    folder, _ = faults
    run = folder / "runs" / "faults"
    before = records(run)
    done = benchbox_run(folder / "faults.yaml", "--only", "size in [raises, healthy]")
    after = records(run)
    changed = {name for name in before if after[name]["started_at"] != before[name]["started_at"]}
    assert changed == {"raises 0"}, done.stdout + done.stderr
    assert done.returncode == 3
    assert len(json.loads((run / "run.json").read_text())["cells"]) == 9  # --only leaves the others in the run


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[tuple[Path, subprocess.CompletedProcess[str]]]:
    """Stop a run of three cells by Ctrl-C in the second one, after an attempt to start it a second time."""
    text = (
        MATRIX.replace("ddp", "single")
        .replace("world_size: 2", "world_size: 1")
        .replace("hang_after_s: 10", "hang_after_s: 200")
    )
    text = re.sub(r"\[raises, .*\]", "[healthy, waits, healthy_too]", text)
    (tmp_path / "faults.yaml").write_text(text)
    (tmp_path / "gate").touch()
    process = subprocess.Popen(
        command(tmp_path / "faults.yaml"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        events = "runs/faults/cells/*/launch-1/events-rank0.jsonl"
        wait_until(lambda: len(list(tmp_path.glob(events))) == 2)
        second = benchbox_run(tmp_path / "faults.yaml")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, out + err
        assert "resume with: benchbox run" in err.splitlines()[-1]
        yield tmp_path, second
    finally:
        process.kill()


def test_ctrl_c_ends_the_group_and_the_same_command_resumes(stopped: Any) -> None:
    folder, second = stopped
    run = folder / "runs" / "faults"
    assert second.returncode == 2
    assert "another run (process " in second.stderr
    assert survivors(folder) == []
    before = records(run)
    assert {name: record["status"] for name, record in before.items()} == {"healthy 0": "ok", "waits 0": "interrupted"}
    (folder / "gate").unlink()
    done = benchbox_run(folder / "faults.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    after = records(run)
    assert [record["status"] for record in after.values()] == ["ok"] * 3
    assert after["healthy 0"]["started_at"] == before["healthy 0"]["started_at"]
    assert "1 of 3 launches are done already" in done.stdout.splitlines()


def test_a_cell_beyond_the_memory_limit_ends_as_oom_and_a_smaller_one_is_measured(tmp_path: Path) -> None:
    """Batch 1 takes 8.7 MiB. Another limit outdates the record."""
    (tmp_path / "limit.yaml").write_text(MEMORY_MATRIX)
    done = benchbox_run(tmp_path / "limit.yaml")
    by_batch = {
        record["cell"]["batch"]: record
        for record in (json.loads(path.read_text()) for path in tmp_path.glob("runs/limit/cells/*/launch-1.json"))
    }
    assert {batch: record["status"] for batch, record in by_batch.items()} == {1: "ok", 64: "oom"}, done.stdout + done.stderr
    error = by_batch[64]["error"]
    assert (error["type"], error["rank"]) == ("OutOfMemoryError", 0)
    assert error["message"].endswith("and measure.memory_limit is 16.0 MiB")
    assert by_batch[1]["memory"]["worst"]["allocated_peak_bytes"] < 16 * 2**20
    assert by_batch[1]["memory_limit_bytes"] == 16 * 2**20
    assert done.returncode == 3
    again = benchbox_run(tmp_path / "limit.yaml", "--set", "measure.memory_limit=17 MiB", "--only", "batch=1", "--dry-run")
    assert "1 would run" in again.stdout


def test_a_cell_beyond_the_time_limit_or_the_policy_ends_as_timeout_or_unsupported(tmp_path: Path) -> None:
    (tmp_path / "limits.yaml").write_text(LIMITS_MATRIX)
    done = benchbox_run(tmp_path / "limits.yaml")
    by_size = records(tmp_path / "runs" / "limits")
    slow, healthy = by_size["slow 0"], by_size["healthy 0"]
    assert (slow["status"], slow["error"]["type"]) == ("timeout", "Timeout"), done.stdout + done.stderr
    assert "time.sleep(2)" in slow["error"]["ranks"][0]["stack"]
    assert (healthy["status"], healthy["error"]["type"]) == ("unsupported", "UnsupportedError")
    assert healthy["error"]["message"].startswith("freeze freeze_vision")
    assert done.returncode == 3
    assert survivors(tmp_path) == []
