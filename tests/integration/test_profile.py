"""A cell profiled on two real ranks, beside the measured peaks of this machine, and its costs against a published record."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from benchbox.analysis.profile import build_profile
from benchbox.cli.app import app
from benchbox.launch.profiling import profile_cell
from benchbox.measure.environment import environment
from benchbox.measure.peaks import peak_dtypes
from benchbox.report.profile import render_profile
from benchbox.store.peaks import MeasuredPeaks, read_peaks
from benchbox.store.run import RunStore
from tests.support.launchers import MEASURE, DirectLauncher, cell

if TYPE_CHECKING:
    from benchbox.registry.launch_record import LaunchRecord

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "policies"
SIZES = {
    "matmul": {"large": (1, 512, 512, 512), "thin": (1, 64, 256, 256), "batched": (8, 64, 64, 16)},
    "copy": 2**24,
    "all_reduce": 2**16,
}

pytestmark = pytest.mark.ranks


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peaks of two ranks in a cache, the profile of pi05 tiny under DDP, and what both commands printed."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchbox.launch.peaks.SIZES", {"cpu": SIZES, "cuda": SIZES})
        patch.setattr("benchbox.launch.peaks.LIMIT_S", 0.05)
        # Not in the environment of the ranks, who would need a fork server of their own.
        patch.setattr("benchbox.store.machine_cache.os", SimpleNamespace(environ={"XDG_CACHE_HOME": str(folder / "cache")}))
        (folder / "peaks.txt").write_text(invoke("doctor", "--peaks", "--ranks", "2"))
        text = invoke("profile", PUBLISHED, "--cell", published_record()["cell_id"], "--steps", "3", "--out", folder / "out")
        (folder / "profile.txt").write_text(text)
    return folder


@pytest.fixture
def profile(folder: Path) -> Any:
    return json.loads((folder / "out" / "profile.json").read_text())


@pytest.fixture
def peaks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredPeaks:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (peaks,) = read_peaks(environment()["machine"]).values()
    return peaks


def published_record() -> LaunchRecord:
    return next(record for record in RunStore(PUBLISHED).records() if record["cell"]["policy"] == "pi05")


def test_peaks_have_a_rate_for_every_dtype_and_class_of_shape(peaks: MeasuredPeaks, folder: Path) -> None:
    import torch

    assert tuple(peaks.matmul) == peak_dtypes(torch.device(peaks.device))
    rates = [rate for rates in peaks.matmul.values() for rate in rates.values()]
    assert len(rates) == 3 * len(peaks.matmul)
    assert peaks.ranks == 2
    assert peaks.all_reduce is not None
    assert all(rate["per_s"] > 0 and rate["spread"] >= 0 for rate in [*rates, peaks.copy, peaks.update, peaks.all_reduce])
    output = (folder / "peaks.txt").read_text()
    assert "bfloat16 large" in output
    assert str(folder / "cache") in output


def test_the_trace_of_every_rank_has_all_steps_with_all_their_phases_and_towers(profile: Any, folder: Path) -> None:
    phases = {row["phase"] for row in profile["phases"]} - {"outside the phases"}
    assert {"data_wait", "forward", "backward", "clip", "optimizer", "zero_grad", "sync"} == phases
    for rank in (0, 1):
        events = json.loads((folder / "out" / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = Counter(event.get("name") for event in events if event.get("ph") == "X")
        assert names["step"] == 3
        assert {phase: names[f"phase:{phase}"] for phase in phases} == dict.fromkeys(phases, 3)
        assert min(names[f"tower:{tower}"] for tower in ("vision", "backbone", "expert")) >= 3


def test_times_of_phases_add_up_to_the_step(profile: Any) -> None:
    for rank in profile["ranks"]:
        for step, step_s in enumerate(rank["step_s"]):
            assert 0 < sum(times[step] for times in rank["phases_s"].values()) <= step_s
    (outside,) = (row for row in profile["phases"] if row["phase"] == "outside the phases")
    assert outside["share"] < 0.1
    assert sum(row["seconds"] for row in profile["phases"]) == pytest.approx(profile["step_s"])


def test_flops_of_the_phases_of_all_ranks_are_those_of_the_record(profile: Any) -> None:
    flops = published_record()["flops"]
    assert flops is not None
    counted = sum(product["flops"] for rank in profile["ranks"] for product in rank["products"])
    assert counted == (flops["model_flops_per_step"] or 0) + (flops["recomputed_flops_per_step"] or 0)
    by_phase = {row["phase"]: row["flops"] for row in profile["phases"] if row["flops"]}
    assert by_phase.keys() == {"forward", "backward"}


def test_flops_of_towers_are_those_of_the_policys_formula(profile: Any) -> None:
    flops = published_record()["flops"]
    assert flops is not None
    counted: Counter[tuple[str, str]] = Counter()
    for rank in profile["ranks"]:
        for product in rank["products"]:
            counted[product["tower"], product["phase"]] += product["flops"]
    formula = flops["per_tower"] or {}
    assert {"vision", "backbone", "expert", "head"} <= formula.keys()
    for tower, cost in formula.items():
        assert counted[tower, "forward"] == cost["forward"], tower
        assert counted[tower, "backward"] == cost["backward"] + cost["recomputed"], tower


def test_towers_have_all_products_of_forward_and_what_none_has_is_shown(profile: Any) -> None:
    """Counted in FLOPs: in a step this small, ranks wait for one another in forward for as long as they compute."""
    for phase in ("forward", "backward"):
        rows = {row["tower"]: row for row in profile["towers"] if row["phase"] == phase}
        assert {"vision", "backbone", "expert", "none"} <= rows.keys()
        assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
        assert all(row["seconds"] > 0 for row in rows.values())
        assert rows["none"]["flops"] <= 0.1 * sum(row["flops"] for row in rows.values())


def test_the_optimizer_moves_at_least_the_bytes_of_masters_moments_and_weights(profile: Any) -> None:
    """Masters and both moments are read and written, gradients read, live weights written: 28 bytes per parameter."""
    parameters = published_record()["observed"]["total_numel"]  # type: ignore[index]
    (row,) = (row for row in profile["phases"] if row["phase"] == "optimizer")
    assert row["bytes"] >= 0.9 * 28 * parameters
    assert row["collective_bytes"] == 0
    (backward,) = (row for row in profile["phases"] if row["phase"] == "backward")
    assert backward["collective_bytes"] >= 2 * 0.9 * parameters, "DDP reduces bfloat16 gradients"


def test_with_peaks_phases_with_products_have_their_share_and_the_text_says_it(profile: Any, folder: Path) -> None:
    text = (folder / "profile.txt").read_text()
    for row in profile["phases"]:
        if row["flops"]:
            assert 0 < row["of_peak"] < 1
            assert (
                f"at {row['of_peak']:.0%}" in text.split("forward runs ")[1].split(" of what this device can do in products")[0]
            )
    assert "trace-rank1.json" in text


def test_a_profile_that_was_measured_on_a_busy_host_says_so(profile: Any) -> None:
    ranks = profile["ranks"]
    assert all(rank["host"]["cpu_s"] > 0 for rank in ranks)
    counters = {**ranks[0]["host"]["counters"], "window_s": 10.0, "cores": 2, "busy_s": 15.0, "steal_s": 0.0}
    shared = [{**ranks[0], "host": {**ranks[0]["host"], "cpu_s": 5.0, "counters": counters}}]
    shared.append({**ranks[1], "host": {**ranks[1]["host"], "cpu_s": 5.0}})
    busy = build_profile(profile["cell_id"], profile["cell"], shared, {})
    assert busy["busy_host"] == ["other processes used 25% of the CPU time"]
    assert "other processes used 25% of the CPU time" in render_profile(busy)
    counters["busy_s"] = 10.0
    assert build_profile(profile["cell_id"], profile["cell"], shared, {})["busy_host"] == []


def test_without_peaks_shares_are_null_and_the_reason_names_the_command(profile: Any) -> None:
    unmeasured = build_profile(profile["cell_id"], profile["cell"], profile["ranks"], {})
    for row in unmeasured["phases"]:
        assert row["of_peak"] is row["of_shapes"] is row["of_memory"] is row["bound"] is None
    assert unmeasured["peaks_reason"] is not None
    assert "benchbox doctor --peaks --ranks 2" in unmeasured["peaks_reason"]
    assert unmeasured["summary"] is None
    assert unmeasured["peaks_reason"] in render_profile(unmeasured)


def test_a_profile_that_its_user_stops_is_none_and_no_failure_and_one_in_its_place_removes_its_traces(tmp_path: Path) -> None:
    """The earlier profile may be of more ranks."""
    launcher: Any = DirectLauncher()
    options: Any = {"profiled_steps": 2, "folder": tmp_path / "out", "launcher": launcher, "stop": lambda: True}
    assert profile_cell(cell("sleeps", 1), MEASURE, **options) is None
    assert launcher.started == [("sleeps", 1)]
    for name in ("trace-rank0.json", "trace-rank7.json.gz", "notes.txt"):
        (tmp_path / "out" / name).touch()
    assert profile_cell(cell("sleeps", 1), MEASURE, **options) is None
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"notes.txt", "ranks"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "backends"], "11 cells are selected, and one is profiled"),
        (["profile", "backends", "--only", "backend=zero9"], "no cell has backend zero9"),
        (["profile", str(PUBLISHED)], "name one of its cells by --cell ID"),
        (["profile", str(PUBLISHED), "--cell", "zzz"], "has no such cell"),
        (["profile", str(PUBLISHED), "--cell", "0", "--set", "batch=1"], "--set and --only are for a matrix"),
        (["profile", "backends", "--only", "backend=ddp", "--out", str(ROOT / "pyproject.toml")], "pyproject.toml is a file"),
        (["doctor", "--peaks", "--ranks", "0"], "at least one rank"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert message in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 2
