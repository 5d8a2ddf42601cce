"""A run whose command is killed by SIGKILL at random moments and started again until it completes, beside an undisturbed run.

    python -m tests.support.runner_kills 100 [SEED]

kills a command a hundred times and prints what was lost. The suite does the same with a few kills.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from benchbox.launch.process.environment import host_variables
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.store.chain import Chain
from tests.support.commands import run_in_process
from tests.support.fork_servers import SharedForkServers

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICIES = Path(__file__).parents[1] / "integration" / "policies"
MATRIX = """\
name: kills
policy: faulty
size: healthy
backend: single
recipe: fp32
world_size: 1
data: synthetic
axes:
  batch: [2, 3, 4]
measure: {warmup_steps: 1, steps: 2, launches: 1}
"""
# Columns whose values are measured times, or follow from them or from the load of the machine.
_MEASURED = ("started_at", "duration_s", "global_samples_per_s", "mfu", "hfu", "host.")
_END_LIMIT_S = 30.0


@dataclass
class Kills:
    """Counts of what became of the launches of runs that were killed."""

    kills: int = 0
    runs: int = 0
    moments_s: list[float] = field(default_factory=list)  # of the kills, from the start of the command
    kills_with_record: int = 0  # with at least one record on disk, so that the next command resumed
    lost: list[str] = field(default_factory=list)  # records that were ok at one time and later gone, torn or without a row
    measured_twice: list[str] = field(default_factory=list)  # ok records that a later command replaced
    differences: list[str] = field(default_factory=list)  # of tables from that of the undisturbed run
    orphans: list[str] = field(default_factory=list)  # processes of a launch that outlived the command for long
    leftovers: list[str] = field(default_factory=list)  # temporary files in completed runs
    verify_problems: list[str] = field(default_factory=list)


def kill_runs(folder: Path, count: int, seed: int = 0) -> Kills:
    """Kill runs `count` times at random moments, each run until it completes, and compare them with an undisturbed one."""
    draw = random.Random(seed)
    matrix = folder / "kills.yaml"
    matrix.write_text(MATRIX)
    reference = folder / "undisturbed"
    _wait_for_server()
    start = time.monotonic()
    _complete(matrix, reference)
    duration_s = time.monotonic() - start
    expected = _read_table(reference)
    result = Kills()
    while result.kills < count:
        result.runs += 1
        run = folder / f"killed-{result.runs}"
        ok: dict[str, str] = {}  # path of the record -> start of the launch
        is_complete = False
        while not is_complete and result.kills < count:
            moment_s = draw.uniform(0, duration_s)
            is_complete = not _kill_after(moment_s, matrix, run)
            if not is_complete:
                result.kills += 1
                result.moments_s.append(moment_s)
                result.orphans += _wait_for_end(run)
            _compare_records(run, ok, result)
            result.kills_with_record += not is_complete and bool(ok)
        if not is_complete:
            done = run_in_process(*_command(matrix, run)[3:], cwd=matrix.parent)
            assert done.returncode == 0, done.stdout + done.stderr
            _compare_records(run, ok, result)
        result.differences += [f"{run.name}: {text}" for text in _table_differences(expected, _read_table(run))]
        result.leftovers += [str(path.relative_to(folder)) for path in run.rglob("*.tmp")]
        result.verify_problems += _verify(run)
    return result


def _command(matrix: Path, run: Path) -> list[str]:
    options = ["--policy-dir", str(POLICIES), "--out", str(run)]
    return [sys.executable, "-m", "benchbox.cli.app", "run", str(matrix), *options]


def _wait_for_server() -> None:
    """Wait until the shared fork server has imported, so that the undisturbed run takes as long as the others."""
    launcher = ForkServerLauncher()
    launcher._server({**os.environ, **host_variables(os.environ), **launcher.variables(1)})
    launcher.close()


def _complete(matrix: Path, run: Path) -> None:
    done = subprocess.run(_command(matrix, run), capture_output=True, text=True, cwd=matrix.parent, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _kill_after(moment_s: float, matrix: Path, run: Path) -> bool:
    """Start the command and kill it; return False if it ended before."""
    process = subprocess.Popen(_command(matrix, run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=matrix.parent)
    try:
        _, errors = process.communicate(timeout=moment_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return True
    assert process.returncode == 0, errors.decode()
    return False


def _processes(run: Path) -> Iterator[psutil.Process]:
    """Yield processes that have a file of a run open, as the ranks of its launches have, or were started for it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            files = [os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()]  # noqa: PTH115 (not resolved)
            of_job = process.environ().get("BENCHBOX_JOB", "").startswith(str(run))
            if of_job or any(file.startswith(f"{run}/") for file in files):
                yield process


def _wait_for_end(run: Path) -> list[str]:
    """Wait until no process of the launches is left; return those that stay."""
    deadline = time.monotonic() + _END_LIMIT_S
    while alive := list(_processes(run)):
        if time.monotonic() > deadline:
            return [f"{run.name}: process {process.pid}" for process in alive]
        time.sleep(0.05)
    return []


def _compare_records(run: Path, ok: dict[str, str], result: Kills) -> None:
    """Compare the records on disk with the ok ones that were there before, and add the new ones to these."""
    now: dict[str, str] = {}
    for path in run.glob("cells/*/launch-*.json"):
        try:
            record: dict[str, Any] = json.loads(path.read_text())
        except ValueError:
            result.lost.append(f"{path}: torn")
            continue
        if record["status"] == "ok":
            now[str(path)] = record["started_at"]
    result.lost += [f"{path}: gone" for path in ok.keys() - now.keys()]
    result.measured_twice += [path for path in ok.keys() & now.keys() if ok[path] != now[path]]
    ok |= now


def _read_table(run: Path) -> pd.DataFrame:
    table = pd.read_parquet(run / "table.parquet").sort_values(["cell_id", "launch"]).reset_index(drop=True)
    return table[[name for name in table if not name.startswith(_MEASURED) and "time" not in name and not name.endswith("_s")]]


def _table_differences(expected: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    if list(table.columns) != list(expected.columns) or len(table) != len(expected):
        return [f"{table.shape} rows and columns, {expected.shape} expected"]
    return [
        f"{name} in row {row} is {value}, {other} expected"
        for name in table
        for row, (value, other) in enumerate(zip(table[name], expected[name], strict=True))
        if not (_is_missing(value) and _is_missing(other)) and value != other
    ]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def _verify(run: Path) -> list[str]:
    """Return what contradicts the chain and how often a launch has a record in it, beyond what a kill explains.

    A command that is killed between the entry and the record measures the launch again, which adds an entry.
    """
    defect = Chain(run / "chain.jsonl").defect()
    problems = [f"{run.name}: {defect}"] if defect else []
    done = run_in_process("verify", run)
    # Steps of a millisecond beside other processes: how their times add up says nothing about kills.
    lines = [line for line in done.stdout.splitlines() if "chain" in line or "record of" in line or "malformed" in line]
    return problems + [
        f"{run.name}: {line}" for line in lines if "violated" in line or "removed" in line or "malformed" in line
    ]


def main() -> None:
    """Kill as often as the command line says and print what became of the launches."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    servers = SharedForkServers()
    servers.start()
    try:
        with tempfile.TemporaryDirectory(prefix="runner-kills-") as folder:
            result = kill_runs(Path(folder), count, seed)
    finally:
        servers.close()
    print(f"{result.kills} kills in {result.runs} runs, {result.kills_with_record} of them with records on disk")
    for name in ("lost", "measured_twice", "differences", "orphans", "leftovers", "verify_problems"):
        values = getattr(result, name)
        print(f"{name}: {len(values)}", *values, sep="\n  ")


if __name__ == "__main__":
    main()
