"""A run of performance tests measures once more what missed a bound or its baseline, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchbox.analysis.baseline import slug
from benchbox.analysis.ratios import merge_runs
from benchbox.store.baseline import baseline_path
from benchbox.store.benchmarks import read_benchmarks, write_benchmarks_baseline
from tests.support.perf_run import measure_and_repeat

if TYPE_CHECKING:
    from pathlib import Path

TESTS = """
from pathlib import Path

import pytest

def runs(name):
    file = Path(name)
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())

@pytest.mark.parametrize("name", Path("names").read_text().split())
def test_cost(benchmark, name):
    run = runs(name)
    benchmark.pedantic(lambda: None, rounds=1)
    is_slow = name == "slow" or name == "slow_once" and run == 1
    value = 3.0 if is_slow and Path("reports").exists() else 1.0 + run / 1000
    benchmark.extra_info["ratios"] = {"with_over_without": {"value": value, "better": "lower"}}
    assert name != "bound" and (name != "bound_once" or run > 1)
"""
RUNS = 5  # of the baseline


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (tmp_path / "test_costs.py").write_text(TESTS)
    return tmp_path


def promote(folder: Path, *names: str) -> None:
    """Make a baseline of runs in which all ratios are near 1, and forget that they ran."""
    (folder / "names").write_text(" ".join(names))
    file = folder / "perf.json"
    assert measure_and_repeat(("test_costs.py",), file) == 0
    content = json.loads(file.read_text())
    runs = []
    for number in range(RUNS):
        for benchmark in content["benchmarks"]:
            benchmark["extra_info"]["ratios"]["with_over_without"]["value"] = 1 + number / 100
        file.write_text(json.dumps(content | {"datetime": f"run {number}"}))
        runs.append(read_benchmarks(file))
    merged = merge_runs(runs)
    path = baseline_path(folder / "reports" / "baselines", slug(merged.machine), "perf")
    path.parent.mkdir(parents=True)
    write_benchmarks_baseline(path, merged)
    for name in names:
        (folder / name).unlink()


def measure(folder: Path, *names: str) -> tuple[int, dict[str, int], dict[str, float]]:
    """Return pytest's exit code, how often each test ran, and the ratio that is kept of each."""
    (folder / "names").write_text(" ".join(names))
    code = measure_and_repeat(("test_costs.py",), folder / "perf.json")
    ratios = read_benchmarks(folder / "perf.json").ratios
    values = {ratio.test.partition("[")[2].rstrip("]"): ratio.values[0] for ratio in ratios}
    return code, {name: len((folder / name).read_text()) for name in names}, values


def test_breaches_and_missed_bounds_are_repeated_once_and_their_new_ratios_kept(folder: Path) -> None:
    """Nothing is repeated for a ratio that is missing."""
    promote(folder, "quiet", "slow_once", "slow", "gone")
    code, runs, ratios = measure(folder, "quiet", "slow_once", "slow", "bound_once")
    assert code == 0
    assert runs == {"quiet": 1, "slow_once": 2, "slow": 2, "bound_once": 2}
    assert ratios == {"quiet": 1.001, "slow_once": 1.002, "slow": 3.0, "bound_once": 1.002}


def test_a_bound_that_is_missed_twice_fails_also_without_a_baseline(folder: Path) -> None:
    code, runs, _ = measure(folder, "quiet", "bound")
    assert code == 1
    assert runs == {"quiet": 1, "bound": 2}
