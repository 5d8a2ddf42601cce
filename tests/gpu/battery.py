"""Run what a GPU has to show, for `make gpu`: `tests/gpu`, peaks, a profile, matrices/h200_single.yaml, pi05 beside lerobot.

A repeated call continues: steps that ended with the same sources on the same device are not run again, except tests that
failed, which come last. `benchbox run` reuses the records of an interrupted step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
WORK = ROOT / "runs" / "gpu"  # may be carried from one machine to the next
MATRIX = "matrices/h200_single.yaml"
RUN = WORK / "h200_single"
PARTS = tuple(
    f"policy={policy}, attention={kernel}" for kernel in ("sdpa", "eager", "flex") for policy in ("pi05", "pi07_low_level")
)
PROFILED = "policy=pi05, attention=sdpa, batch=16, compile=off"  # one cell: fused operations of a compiled one are not seen
LEROBOT = ROOT / "build" / "gpu-lerobot"  # docs/gpu.md says how to fill it
# Tests that time the device or take its memory. All others run side by side: most of their time is that of the host.
ALONE = frozenset({"test_launches", "test_master_speed", "test_phase_clock"})
TEST_TIMEOUT_S = 400
GRACE_S = 40  # from SIGINT to SIGKILL

EXIT_FAILED, EXIT_NO_GPU, EXIT_CELL_FAILED, EXIT_STOPPED = 1, 2, 3, 130  # 3 and 130 are those of `benchbox run`


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the battery."""

    name: str
    command: tuple[str, ...]
    is_test: bool = False

    @property
    def is_alone(self) -> bool:
        """Return whether nothing else may use the device while it runs."""
        return not self.is_test or self.name in ALONE


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a step that ended: its exit code, and for tests the outcome of each."""

    exit_code: int
    duration_s: float
    outcomes: dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after so many seconds; a new call continues")
    deadline = time.monotonic() + parser.parse_args().limit_s
    device = describe_device()
    problem = missing_requirement() or (None if device["device"] else f"torch {device['torch']} sees no GPU")
    if problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return EXIT_NO_GPU
    results = Results(WORK / "battery.json", {**device, "sources": sources_sha256()})
    for steps in grouped(results.pending(all_steps())):
        print(f"\n{', '.join(step.name for step in steps)}", flush=True)
        stopped = []
        for step, ended in zip(steps, execute(steps, deadline), strict=True):
            if ended is None:
                stopped.append(step.name)
            elif step.name.startswith(MATRIX) and ended.exit_code not in (0, EXIT_CELL_FAILED):
                return ended.exit_code
            else:
                results.add(step, ended)
        if stopped:
            print(f"\nmake gpu: stopped in {', '.join(stopped)}; the same command continues", file=sys.stderr)
            return EXIT_STOPPED
    return write_report(results)


def all_steps() -> list[Step]:
    tests = [
        Step(
            path.stem,
            (*module("pytest"), "-q", "--timeout", str(TEST_TIMEOUT_S), "--junitxml", str(junit(path.stem)), str(path)),
            True,
        )
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
    ]
    cli = module("benchbox.cli.app")
    run = (*cli, "run", MATRIX, "--out", str(RUN), "--no-estimate", "--only")  # predictions need no GPU, and take minutes
    return [
        *tests,
        Step("doctor --peaks", (*cli, "doctor", "--peaks")),
        Step("profile", (*cli, "profile", MATRIX, "--only", PROFILED, "--out", str(WORK / "profile"))),
        *(Step(part_name(part), (*run, part)) for part in PARTS),
        *([Step("beside lerobot", (*module("tests.peers.gpu"), "--lerobot", str(LEROBOT)))] if LEROBOT.is_dir() else []),
    ]


def grouped(steps: list[Step]) -> list[list[Step]]:
    """Return the steps in the groups that run at once, those that share the device first."""
    together = [step for step in steps if not step.is_alone]
    return [*([together] if together else []), *([step] for step in steps if step.is_alone)]


def part_name(part: str) -> str:
    return f"{MATRIX}: {part}"


def module(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", name


def junit(name: str) -> Path:
    return WORK / "junit" / f"{name}.xml"


def missing_requirement() -> str | None:
    """Return what to install; a bundle relies on packages of the machine, which may lack some or have old ones."""
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(line)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            return f"{requirement} is not installed in {sys.executable}"
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"{requirement} is required, and {sys.executable} has {installed}"
    return None


def describe_device() -> dict[str, str]:
    """Return the versions of Python and torch and the name of the first GPU, empty if torch sees none.

    Another process asks: a CUDA context in this one would take memory of the device while others measure it.
    """
    query = (
        "import json, platform, torch; name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ''; "
        "print(json.dumps({'python': platform.python_version(), 'torch': torch.__version__, 'device': name}))"
    )
    output = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True, check=True).stdout
    device: dict[str, str] = json.loads(output.splitlines()[-1])
    return device


def sources_sha256() -> str:
    """Return the SHA-256 of the sources that results depend on."""
    digest = hashlib.sha256()
    folders = ("benchbox", "policies", "tests/gpu", "tests/peers", "tests/support")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".yaml", ".c"}]
    for path in sorted([*files, ROOT / MATRIX]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Results:
    """The steps that have ended, in a file that is written after each of them."""

    def __init__(self, path: Path, key: dict[str, str]) -> None:
        self._path = path
        self.key = key
        self.steps: dict[str, Ended] = {}
        if path.is_file():
            stored = json.loads(path.read_text())
            if stored["key"] == key:
                self.steps = {name: Ended(**values) for name, values in stored["steps"].items()}
            else:
                print("sources, torch or device have changed: starting anew")

    def pending(self, steps: list[Step]) -> list[Step]:
        """Return the steps that have not ended, then the tests that failed."""
        new = [step for step in steps if step.name not in self.steps]
        return new + [step for step in steps if step.is_test and step.name in self.steps and self.steps[step.name].exit_code]

    def add(self, step: Step, ended: Ended) -> None:
        self.steps[step.name] = ended
        self._path.write_text(self.to_json())

    def to_json(self) -> str:
        return json.dumps({"key": self.key, "steps": {name: asdict(ended) for name, ended in self.steps.items()}}, indent=1)


def execute(steps: list[Step], deadline: float) -> list[Ended | None]:
    """Run steps at once, each to its end; None for those that the limit or the user stopped, which leaves nothing running."""
    start = time.monotonic()
    if start >= deadline:
        return [None] * len(steps)
    logs = {step: WORK / "logs" / f"{step.name}.log" for step in steps if len(steps) > 1}
    processes = {step: start_step(step, logs.get(step)) for step in steps}
    ended: dict[Step, Ended] = {}
    try:
        while running := [step for step in steps if step not in ended]:
            for step in running:
                exit_code = processes[step].poll()
                if exit_code is not None and exit_code != EXIT_STOPPED:
                    ended[step] = Ended(exit_code, time.monotonic() - start, read_outcomes(junit(step.name)))
                    if step in logs:
                        print(f"\n{step.name}\n{logs[step].read_text(errors='replace')}", flush=True)
            if time.monotonic() >= deadline or EXIT_STOPPED in {process.returncode for process in processes.values()}:
                break
            time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    stop(processes.values())
    return [ended.get(step) for step in steps]


def start_step(step: Step, log: Path | None) -> subprocess.Popen[bytes]:
    """Start the process of a step, whose output goes to the terminal or into a log."""
    junit(step.name).parent.mkdir(parents=True, exist_ok=True)
    junit(step.name).unlink(missing_ok=True)
    if log is None:
        return subprocess.Popen(step.command, cwd=ROOT)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(step.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def stop(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Interrupt processes that still run, and kill those that do not end within `GRACE_S`."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + GRACE_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_outcomes(path: Path) -> dict[str, str]:
    """Return passed, failed, error or skipped by test."""
    if not path.is_file():
        return {}
    outcomes = {}
    for case in ET.parse(path).iter("testcase"):
        problems = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        outcomes[str(case.get("name"))] = {"failure": "failed"}.get(problems[0], problems[0]) if problems else "passed"
    return outcomes


def write_report(results: Results) -> int:
    """Write the report of the matrix and the outcomes of the steps, print a summary, and return the exit code."""
    device = results.key["device"]
    out = ROOT / "reports" / ("h200" if "H200" in device else re.sub(r"[^a-z0-9]+", "-", device.lower()))
    cli = module("benchbox.cli.app")
    reported = subprocess.run([*cli, "report", str(RUN), "--out", str(out), "--pack"], cwd=ROOT, check=False)
    verified = subprocess.run([*cli, "verify", str(out)], cwd=ROOT, check=False)
    (out / "battery.json").write_text(results.to_json() + "\n")
    if (profile := WORK / "profile" / "profile.json").is_file():
        shutil.copy(profile, out)
    outcomes = Counter(outcome for ended in results.steps.values() for outcome in ended.outcomes.values())
    print(f"\n{device}, torch {results.key['torch']}; report: {out}")
    if not LEROBOT.is_dir():
        print(f"not compared with lerobot: {LEROBOT.relative_to(ROOT)} is not there; docs/gpu.md says how to fill it")
    print("tests: " + (", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "none"))
    failed = {name for name, ended in results.steps.items() if ended.exit_code}
    for name in sorted(failed):
        print(f"not ok: {name}")
    if reported.returncode or verified.returncode or not failed <= set(map(part_name, PARTS)):
        return EXIT_FAILED
    return EXIT_CELL_FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
