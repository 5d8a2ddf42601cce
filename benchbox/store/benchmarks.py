"""Ratios of tests that pytest-benchmark ran: its JSON file, and baselines made of several of these files.

A test records what it compares in one process under `benchmark.extra_info["ratios"]`:

    {"loop_over_bare": {"value": 0.993, "better": "higher", "goal": 0.98, "rounds": [0.991, 0.993, 0.994]}}

`goal` and `rounds` may be absent. A ratio is positive: log(value) is what is compared.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, get_args

from benchbox import __version__
from benchbox.errors import RecordError
from benchbox.store.files import read_json, write_json
from benchbox.store.json_types import type_problem
from benchbox.store.record import SCHEMA_VERSION, check_keys, check_version

if TYPE_CHECKING:
    from pathlib import Path

Better = Literal["lower", "higher"]
BASELINE_KIND = "benchmarks"


class _RatioEntry(TypedDict):
    value: float | int
    better: str
    goal: NotRequired[float | int | None]
    rounds: NotRequired[list[float | int]]


class _Benchmark(TypedDict):
    fullname: str
    extra_info: dict[str, Any]
    stats: dict[str, Any]


class _BenchmarksFile(TypedDict):
    """Content of a file of `pytest --benchmark-json`, as far as it is read."""

    machine_info: dict[str, Any]
    commit_info: dict[str, Any]
    benchmarks: list[_Benchmark]
    datetime: str


class _StoredRatio(TypedDict):
    test: str
    name: str
    better: str
    values: list[float]
    goal: float | None
    rounds: list[float]


class _BaselineFile(TypedDict):
    """Content of a baseline of benchmarks."""

    machine: str
    commit: str | None
    started_at: list[str]
    ratios: list[_StoredRatio]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRatio:
    """A ratio that a test measured between two things in one process, once or in several runs of the tests."""

    test: str  # as pytest names it
    name: str
    better: Better
    values: tuple[float, ...]  # one for each run of the tests
    goal: float | None = None
    rounds: tuple[float, ...] = ()  # of the last run


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one benchmark over its rounds."""

    test: str
    rounds: int
    min_s: float
    median_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """Benchmarks of one run of the tests, or of the runs that a baseline was made of. Only a single run has timings."""

    machine: str
    commit: str | None
    started_at: tuple[str, ...]  # of the runs
    ratios: tuple[MeasuredRatio, ...]
    timings: tuple[Timing, ...] = ()


def is_benchmarks(path: Path) -> bool:
    """Return whether a file has benchmarks: JSON of pytest-benchmark, or a baseline of it. Other files may be anything."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        values = read_json(path)
    except RecordError:
        return False
    return "benchmarks" in values or values.get("kind") == BASELINE_KIND


def read_benchmarks(path: Path) -> Benchmarks:
    """Read a file of `pytest --benchmark-json`, or a baseline of such files.

    Raises:
        RecordError: it is neither, or a ratio in it is not one.
    """
    values = read_json(path, "pytest --benchmark-json FILE writes it")
    if values.get("kind") == BASELINE_KIND:
        return _read_baseline(path, values)
    if problem := type_problem(values, _BenchmarksFile):
        raise RecordError(f"{path}: not the JSON of pytest-benchmark ({problem}); pytest --benchmark-json FILE writes it")
    ratios, timings = [], []
    for benchmark in values["benchmarks"]:
        test, stats = benchmark["fullname"], benchmark["stats"]
        entries = benchmark["extra_info"].get("ratios", {})
        ratios += [_ratio(path, test, name, entry) for name, entry in (entries if isinstance(entries, dict) else {}).items()]
        numbers = [stats.get(key) for key in ("min", "median", "max")]
        if all(isinstance(number, int | float) for number in numbers):
            low, middle, high = map(float, numbers)
            timings.append(Timing(test=test, rounds=int(stats.get("rounds", 0)), min_s=low, median_s=middle, max_s=high))
    return Benchmarks(
        machine=_machine(values["machine_info"]),
        commit=values["commit_info"].get("id"),
        started_at=(values["datetime"],),
        ratios=tuple(ratios),
        timings=tuple(timings),
    )


def write_benchmarks_baseline(path: Path, benchmarks: Benchmarks) -> None:
    content = asdict(replace(benchmarks, timings=()))
    del content["timings"]
    promoted = {"benchbox_version": __version__, "promoted_at": datetime.now(UTC).isoformat(timespec="seconds")}
    write_json(path, {"schema_version": SCHEMA_VERSION, "kind": BASELINE_KIND, **promoted, **content})


def _read_baseline(path: Path, values: dict[str, Any]) -> Benchmarks:
    check_version(values, str(path))
    if problem := type_problem(values, _BaselineFile):
        raise RecordError(f"{path}: not a baseline of benchmarks ({problem})")
    ratios = []
    for entry in values["ratios"]:
        check_keys(entry, MeasuredRatio.__slots__, str(path))
        for value in entry["values"] or [math.nan]:
            _check(path, entry["test"], entry["name"], value, entry["better"])
        ratios.append(MeasuredRatio(**entry | {"values": tuple(entry["values"]), "rounds": tuple(entry["rounds"])}))
    return Benchmarks(
        machine=values["machine"], commit=values["commit"], started_at=tuple(values["started_at"]), ratios=tuple(ratios)
    )


def _ratio(path: Path, test: str, name: str, entry: Any) -> MeasuredRatio:
    problem = "not an object" if not isinstance(entry, dict) else type_problem(entry, _RatioEntry)
    if problem:
        raise RecordError(f"{path}: {test}: ratio {name}: {problem}")
    _check(path, test, name, entry["value"], entry["better"])
    goal, rounds = entry.get("goal"), entry.get("rounds", ())
    return MeasuredRatio(
        test=test, name=name, better=entry["better"], values=(float(entry["value"]),), goal=goal, rounds=tuple(rounds)
    )


def _check(path: Path, test: str, name: str, value: float, better: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise RecordError(f"{path}: {test}: ratio {name} is {value}, and a positive number is expected")
    if better not in get_args(Better):
        raise RecordError(f"{path}: {test}: ratio {name}: better is {better!r}, and lower or higher is expected")


def _machine(info: dict[str, Any]) -> str:
    """Return the machine as environments of launches name it: its processor and the number of cores."""
    cpu: dict[str, Any] = info["cpu"] if isinstance(info.get("cpu"), dict) else {}
    name = cpu.get("brand_raw") or info.get("processor") or info.get("machine") or "machine"
    text = str(name).lower().replace("(r)", "").replace("(tm)", "")
    flags = set(cpu.get("flags") or ())
    instructions = "-avx2" if "avx2" in flags and "avx512f" not in flags else ""
    return f"{text}{instructions}-{cpu.get('count', 1)}-cores"
