"""Parts of `make compat` in an environment: the unit tests, and one cell of three backends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from tests.compat.environments import ROOT, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.compat.environments import Environment

BACKENDS = ("ddp", "fsdp2", "zero2")
_CELLS = ("matrices/policies.yaml", "--set", f"axes.policy=[pi05],axes.backend=[{','.join(BACKENDS)}]")
_WORKERS = str(min(4, os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one part."""

    passed: bool
    summary: str
    failures: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()  # with their reasons

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        return cls(**values | {name: tuple(values[name]) for name in ("failures", "skips")})


def run_unit_tests(environment: Environment) -> Result:
    """Run tests/unit in parallel, as `make test` does."""
    report = environment.folder / "unit-tests.xml"
    report.unlink(missing_ok=True)
    parallel = ("--numprocesses", _WORKERS, "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
    # A busy machine is no failure: the first compilation of torch alone takes minutes of processor time.
    timeout = ("--override-ini", "timeout=3600")
    command = ("-m", "pytest", "tests/unit", "--quiet", *parallel, *timeout, f"--junitxml={report}")
    exit_code = _run(environment, command, "unit-tests.log", {"OMP_NUM_THREADS": "1"})
    return summarise_tests(report, exit_code)


def summarise_tests(report: Path, exit_code: int) -> Result:
    """Return the outcome of a run of pytest from its JUnit report. Collecting no test or writing no report is a failure."""
    if not report.exists():
        return Result(passed=False, summary=f"pytest ended with exit code {exit_code} and wrote no report")
    cases = list(ET.parse(report).iter("testcase"))
    failures = tuple(_test_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skipped = [(case, skip) for case in cases if (skip := case.find("skipped")) is not None]
    passed = len(cases) - len(failures) - len(skipped)
    return Result(
        passed=exit_code == 0 and not failures and passed > 0,
        summary=f"{passed} passed, {len(failures)} failed, {len(skipped)} skipped",
        failures=failures,
        skips=tuple(f"{_test_name(case)}: {skip.get('message')}" for case, skip in skipped),
    )


def run_cells(environment: Environment) -> Result:
    """Run a cell of three backends on two ranks, and require that they were observed as requested."""
    run = environment.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    exit_code = _run(environment, ("-m", "benchbox.cli.app", "run", *_CELLS, "--out", str(run)), "cells.log", {})
    records = [json.loads(path.read_text()) for path in sorted(run.glob("cells/*/launch-*.json"))]
    return summarise_cells(records, exit_code)


def summarise_cells(records: Sequence[dict[str, Any]], exit_code: int) -> Result:
    """Return the outcome of a run from its launch records."""
    statuses = {record["cell"]["backend"]: record["status"] for record in records}
    observed = {record["cell"]["backend"]: (record["observed"] or {}).get("backend") for record in records}
    failures = tuple(
        f"{backend}: {statuses.get(backend, 'no record')}, observed as {observed.get(backend)}"
        for backend in BACKENDS
        if (statuses.get(backend), observed.get(backend)) != ("ok", backend)
    )
    summary = ", ".join(f"{backend} {statuses.get(backend, 'no record')}" for backend in BACKENDS)
    return Result(passed=exit_code == 0 and not failures, summary=summary, failures=failures)


PARTS: dict[str, Callable[[Environment], Result]] = {"unit tests": run_unit_tests, "cells": run_cells}


def _run(environment: Environment, arguments: Sequence[str], log: str, extra: dict[str, str]) -> int:
    """Run Python in an environment, with its output in a log, and return its exit code."""
    with (environment.folder / log).open("w") as output:
        command = [str(environment.python), *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=variables(environment) | extra, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


def _test_name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"
