"""One run of `tests/perf`: what fails, a bound of a test or the check against the baseline, is measured once more.

    python -m tests.support.perf_run build/perf.json

runs the tests, repeats those that missed a bound or have a ratio that `benchbox check` takes for a breach, puts what they now
measured in the place of what they measured before, and ends as the last run of pytest did. A moment of other load, on which 30
ratios have 30 chances, does not come twice, and a regression does. A ratio that is `missing` is not measured by a repetition.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchbox.analysis.ratios import gate_ratios
from benchbox.cli.check import BASELINES
from benchbox.store.benchmarks import read_benchmarks

TESTS = ("tests/perf",)
FAILED = 1  # pytest's exit code when it ran all tests and some failed


def measure_and_repeat(tests: tuple[str, ...], file: Path) -> int:
    """Write the JSON of pytest-benchmark of all tests, and return pytest's exit code."""
    code, failed = _measure(tests, file)
    if code not in (0, FAILED):
        return code
    repeated = sorted(failed | (_breaches(file) if file.exists() else set()))
    if not repeated:
        return code
    print("measured once more:", *repeated, sep="\n  ", flush=True)
    again = file.with_name(f"{file.stem}-again.json")
    code, _ = _measure(repeated, again)
    if again.exists():
        _merge(file, again)
    return code


def _measure(tests: tuple[str, ...] | list[str], file: Path) -> tuple[int, set[str]]:
    """Run tests; return pytest's exit code and the tests that failed."""
    file.unlink(missing_ok=True)  # without a benchmark pytest-benchmark writes none
    cache = file.with_suffix(".cache")
    shutil.rmtree(cache, ignore_errors=True)
    options = ["--capture", "no", "--benchmark-json", str(file), "-o", f"cache_dir={cache.resolve()}"]
    code = subprocess.run([sys.executable, "-m", "pytest", *tests, *options], check=False).returncode
    last_failed = cache / "v" / "cache" / "lastfailed"
    return code, set(json.loads(last_failed.read_text())) if last_failed.exists() else set()


def _breaches(file: Path) -> set[str]:
    return {f"{row.file}::{row.cell}" for row in gate_ratios(read_benchmarks(file), BASELINES) if row.verdict == "breach"}


def _merge(file: Path, again: Path) -> None:
    """Put the benchmarks of the second file in the place of those of the same tests in the first one."""
    content, repeated = (json.loads(path.read_text()) if path.exists() else {"benchmarks": []} for path in (file, again))
    benchmarks = {benchmark["fullname"]: benchmark for benchmark in content["benchmarks"] + repeated["benchmarks"]}
    file.write_text(json.dumps(repeated | content | {"benchmarks": list(benchmarks.values())}))


if __name__ == "__main__":
    sys.exit(measure_and_repeat(TESTS, Path(sys.argv[1])))
