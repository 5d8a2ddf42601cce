"""`benchbox compare` as a user runs it: exit codes, formats, and a run in a commit."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_OK, RecordError, ThresholdError
from benchbox.report import write_reports
from benchbox.store.noise import Noise, NoiseRun, write_noise
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, example_run, steady_records


def write_run(folder, *, step_s, started, launches=5, matrix_file="matrices/example.yaml"):
    store = RunStore(folder)
    store.write_run(example_run([CELL], matrix_file=matrix_file, measure=asdict(MEASURE) | {"launches": launches}))
    for record in steady_records(step_s=step_s, started=started, launches=launches):
        store.write_record(record)
    return folder


@pytest.fixture
def base(tmp_path):
    return write_run(tmp_path / "base", step_s=0.2, started="2025-12-31")


@pytest.fixture
def slower(tmp_path):
    return write_run(tmp_path / "slower", step_s=0.22, started="2026-01-01")


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_a_regression_ends_with_exit_code_4_and_one_line(base, slower):
    result = compare(base, slower)
    assert isinstance(result.exception, ThresholdError)
    assert str(result.exception) == f"1 of 5 figures are worse in {slower} than in {base}"
    header, row, *rest = result.stdout.splitlines()
    assert header.split("  ")[0] == "cell"
    assert row.split()[-1] == "regression"
    assert rest[0] == "4 figures did not change; --all lists them"
    assert len(compare(base, slower, "--all").stdout.splitlines()) == len(result.stdout.splitlines()) + 3


def test_an_improvement_and_a_change_below_what_is_relevant_are_fine(base, slower):
    assert compare(slower, base).exit_code == EXIT_OK
    assert compare(base, slower, "--relevant", "20%").exit_code == EXIT_OK


def test_what_is_not_settled_ends_with_exit_code_5_only_under_strict(base, tmp_path):
    two = write_run(tmp_path / "two", step_s=0.3, started="2026-01-01", launches=2)
    assert compare(base, two).exit_code == EXIT_OK
    strict = compare(base, two, "--strict")
    assert strict.exit_code == EXIT_INCONCLUSIVE
    assert "1 of 5 figures are not settled" in strict.stderr


@pytest.mark.parametrize(
    ("name", "beginning"),
    [
        ("json", "{"),
        ("markdown", "**"),
        ("html", "<!doctype html>"),
        ("junit", "<?xml"),
        ("github", "::error "),
        ("sarif", "{"),
        ("text", "cell "),
    ],
)
def test_every_format_is_printed_and_written(base, slower, tmp_path, name, beginning):
    printed = compare(base, slower, "--format", name)
    assert printed.stdout.startswith(beginning)
    out = tmp_path / "out" / "comparison"
    assert compare(base, slower, "--format", name, "--out", out).stdout == f"{out}\n"
    assert out.read_text() == printed.stdout
    if name == "json":
        assert json.loads(printed.stdout)["counts"] == {"regression": 1, "neutral": 4}
    if name == "sarif":
        (result,) = json.loads(printed.stdout)["runs"][0]["results"]
        assert (result["ruleId"], result["level"]) == ("global_samples_per_s", "error")


def test_annotations_are_at_the_axes_of_the_matrix(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("name: example\npolicy: example\naxes:\n  backend: [ddp]\n")
    slower = write_run(tmp_path / "head", step_s=0.22, started="2026-01-01", matrix_file="m.yaml")
    assert compare(base, slower, "--format", "github").stdout.startswith("::error file=m.yaml,line=3,")


def test_runs_and_baselines_of_commits_are_named_as_git_names_them(base, slower, tmp_path, monkeypatch):
    """The published run of the first commit against that of the working tree, which a later measurement has replaced."""
    monkeypatch.chdir(tmp_path)
    published = tmp_path / "reports" / "example"
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    write_reports(base, published, pack=True)
    CliRunner().invoke(app, ["baseline", "promote", str(base)])
    subprocess.run([*git, "add", "reports", base], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "measure"], check=True)
    write_reports(slower, published, pack=True)
    subprocess.run([*git, "commit", "-q", "-a", "-m", "measure again"], check=True)
    for name in (
        "HEAD~1:reports/example",
        f"HEAD~1:./{base.relative_to(tmp_path)}/",
        "HEAD:reports/baselines/example-cpu-2-cores/example.json",
    ):
        result = compare(name, "reports/example")
        assert str(result.exception) == f"1 of 5 figures are worse in reports/example than in {name}"
    monkeypatch.chdir(base)
    result = compare("HEAD~1:.", published)
    assert str(result.exception) == f"1 of 5 figures are worse in {published} than in HEAD~1:."
    for name in ("HEAD:.", "HEAD:./", "HEAD:../" + base.name):  # launches that are not packed
        assert str(compare(name, slower).exception) == f"1 of 5 figures are worse in {slower} than in {name}"
    monkeypatch.chdir(tmp_path)
    absent = compare("HEAD:reports/absent", "reports/example").exception
    assert isinstance(absent, RecordError)
    assert "no run in that commit" in str(absent)


def test_what_may_vary_is_named_by_keys_and_only_the_metrics_named_are_compared(base, tmp_path):
    store = RunStore(write_run(tmp_path / "other", step_s=0.3, started="2026-01-01"))
    for record in list(store.records()):
        store.write_record(record | {"environment": record["environment"] | {"machine": "another", "torch": "9.9"}})
    refused = compare(base, store.path)
    assert refused.exit_code == EXIT_OK
    assert "--vary machine,torch compares nevertheless" in " ".join(refused.stdout.split())
    for options in (("--vary", "machine, torch"), ("--vary", "machine", "--vary", "torch")):
        varied = compare(base, store.path, *options, "--metric", "step_time_s")
        assert str(varied.exception) == f"1 of 1 figures are worse in {store.path} than in {base}"
        assert "also differ in machine another against Example CPU, 2 cores; torch 9.9 against 2.13.0." in varied.stdout


def test_a_run_whose_own_launches_differ_is_named_with_the_key_in_which_they_do(base, tmp_path):
    store = RunStore(write_run(tmp_path / "mixed", step_s=0.3, started="2026-01-01"))
    for record in list(store.records())[:2]:
        store.write_record(record | {"environment": record["environment"] | {"torch": "9.9"}})
    text = " ".join(compare(base, store.path).stdout.split())
    assert f"The runs also differ in torch (launches of {store.path} differ in torch: " in text


@pytest.mark.parametrize(
    ("change", "figures"),
    [(lambda r: {"environment": r["environment"] | {"machine": "another"}}, "5 of 5"), (lambda _: {"loss": None}, "1 of 5")],
    ids=["incomparable", "missing"],
)
def test_figures_that_are_missing_or_incomparable_are_not_settled_under_strict(base, tmp_path, change, figures):
    store = RunStore(write_run(tmp_path / "other", step_s=0.2, started="2026-01-01"))
    for record in list(store.records()):
        store.write_record(record | change(record))
    assert compare(base, store.path).exit_code == EXIT_OK
    strict = compare(base, store.path, "--strict")
    assert strict.exit_code == EXIT_INCONCLUSIVE
    assert f"{figures} figures are not settled" in strict.stderr


def test_a_change_within_the_noise_floor_of_this_machine_is_not_settled(base, slower, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    noise = Noise(sigma=0.05, launches=12, ratio=1.0, cell="backend=ddp", measured_at="2026-01-02", benchbox_version="1")
    write_noise("example-cpu-2-cores", "example", noise)
    result = compare(base, slower, "--format", "json")
    assert result.exit_code == EXIT_OK, "10% are within the floor of 13%"
    assert json.loads(result.stdout)["counts"] == {"inconclusive": 1, "neutral": 4}
    text = " ".join(compare(base, slower).stdout.split())
    assert "no launch shows how far the machine drifted between them: 4 runs of `benchbox noise` would." in text
    # Launches scatter by less than the difference, and runs by more.
    runs = tuple(
        NoiseRun(started_at=f"2026-01-0{day}T00:00:00+00:00", launches=12, mean=0.05 * day, sigma=0.01) for day in range(1, 5)
    )
    write_noise("example-cpu-2-cores", "example", replace(noise, sigma=0.01, launches=48, runs=runs))
    drifting = compare(base, slower)
    assert drifting.exit_code == EXIT_OK
    text = " ".join(drifting.stdout.split())
    assert "is in its noise floor, from 4 runs of `benchbox noise` within 3.0 days (backend=ddp)." in text
