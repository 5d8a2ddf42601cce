"""Measure every published run again, at the commit that is checked out, and publish them: `make published`.

It takes hours on an idle machine, and an interrupted call continues; `make published ONLY='NAME ...'` measures some of them.
Nothing is published before all that were asked for are measured: it changes tracked files, and records would say that the
sources differ from their commit. Nor is anything if a record names another commit.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.errors import EXIT_INCONCLUSIVE
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
REPETITIONS = [f"repeated/{number}" for number in range(1, 6)]
NOISE = ("--policy-dir", "reports/noise/policies")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run of `runs/`, and the folders of `reports/` that it is published in; without any, only a table is made of it."""

    name: str
    matrix: str
    options: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    verb: str = "run"
    endless_loops: int = 0  # other work on the machine meanwhile


MEASUREMENTS = (
    *(
        Measurement(
            name,
            "matrices/fsdp_vs_zero2.yaml",
            ("--launches", "7"),
            folders=(name, "fsdp_vs_zero2") if name == REPETITIONS[0] else (name,),
        )
        for name in REPETITIONS
    ),
    *(
        Measurement(name, f"matrices/{name}.yaml", folders=(name,))
        for name in ("backends", "policies", "compile", "precision_ab", "reduction_order", "data_order", "policies_full")
    ),
    Measurement("busy_host", "reports/busy_host/busy_host.yaml", folders=("busy_host",), endless_loops=2),
    Measurement("equal", "reports/noise/noise.yaml", (*NOISE, "--only", "size=tiny", "--launches", "2000"), verb="noise"),
    Measurement("slower", "reports/noise/noise.yaml", (*NOISE, "--launches", "250", "--no-estimate")),
    Measurement("waiting", "reports/noise/waiting.yaml", (*NOISE, "--launches", "205", "--no-estimate")),
)
# The tables that are made of several runs: file, script and the runs that it reads.
TABLES = (
    ("repeated/verdicts.md", "repeated/verdicts.py", [f"reports/{name}" for name in REPETITIONS]),
    ("noise/verdicts.md", "noise/study.py", ["runs/equal", "runs/slower"]),
    ("noise/waiting.md", "noise/study.py", ["runs/waiting"]),
)


def main(names: Sequence[str]) -> int:
    known = [measurement.name for measurement in MEASUREMENTS]
    if unknown := sorted(set(names) - set(known)):
        print(f"no such run: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        print("tracked files differ from the commit that records would name: commit or stash them", file=sys.stderr)
        return 2
    selected = [measurement for measurement in MEASUREMENTS if not names or measurement.name in names]
    if not names:  # reports compare with them
        _benchbox("doctor", "--links", "--peaks")
    for measurement in selected:
        with _endless_loops(measurement.endless_loops):
            _benchbox(measurement.verb, measurement.matrix, "--out", f"runs/{measurement.name}", *measurement.options)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    for measurement in selected:
        folder = ROOT / "runs" / measurement.name
        if others := other_launches(folder, commit):
            print(
                f"{folder}: {len(others)} launches are not of commit {commit}, such as {others[0]}: remove it", file=sys.stderr
            )
            return 2
    for measurement in selected:
        for folder in measurement.folders:
            _benchbox("report", f"runs/{measurement.name}", "--out", f"reports/{folder}", "--pack")
            _benchbox("verify", f"reports/{folder}")
    measured = {f"{folder}/{measurement.name}" for measurement in selected for folder in ("runs", "reports")}
    for table, script, runs in TABLES:
        if measured.issuperset(runs):
            done = subprocess.run([sys.executable, f"reports/{script}", *runs], cwd=ROOT, check=True, stdout=subprocess.PIPE)
            (ROOT / "reports" / table).write_bytes(done.stdout)
    return 0


def other_launches(run: Path, commit: str) -> list[str]:
    """Return the launches of a run that were measured at another commit, or with changed files.

    A launch that ran out of memory names none: its ranks ended before they reported.
    """
    expected = (None, {"commit": commit, "dirty": False})
    return [
        f"launch {record['launch']} of {record['cell_id']}"
        for record in RunStore(run).records()
        if (record["environment"] or {}).get("git") not in expected
    ]


def _benchbox(*words: str) -> None:
    """Run a command of benchbox; one that does not end well ends this script, and is in its output.

    `noise` ends with EXIT_INCONCLUSIVE where the host was busy in a launch, which its records and the table say.
    """
    print("benchbox", *words, flush=True)
    done = subprocess.run([sys.executable, "-m", "benchbox", *words], cwd=ROOT, check=False)
    if (words[0], done.returncode) != ("noise", EXIT_INCONCLUSIVE):
        done.check_returncode()


@contextmanager
def _endless_loops(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
