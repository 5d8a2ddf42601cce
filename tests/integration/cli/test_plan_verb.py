from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchbox.cli.plan import print_plan
from benchbox.plan import plan
from benchbox.spec import load_matrix, parse_overrides

MATRICES = Path(__file__).parents[3] / "matrices"


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    folder = tmp_path / "policies" / "alpha"
    folder.mkdir(parents=True)
    (folder / "policy.py").touch()
    (folder / "presets.yaml").write_text("tiny: {}\n")
    path = tmp_path / "trial.yaml"
    path.write_text(
        "name: trial\npolicy: alpha\nsize: tiny\nworld_size: 2\ncheckpointing: true\n"
        "axes: {backend: [zero2, zero3], batch: [1, 2]}\nmeasure: {warmup_steps: 1, steps: 4, launches: 3}\n"
    )
    return path


def test_every_cell_is_printed_with_its_id_and_what_varies(benchbox, matrix):
    result = benchbox("plan", matrix)
    assert result.returncode == 0
    for cell in plan(load_matrix(matrix, policy_dirs=[matrix.parent / "policies"])).cells:
        assert re.search(rf"^{cell.cell_id}  {cell.backend} +{cell.batch}$", result.stdout, re.MULTILINE)
    assert "2 cells x 3 launches = 6 launches of 1 + 4 steps; 2 skipped" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_every_skipped_cell_is_printed_with_its_reason(benchbox, matrix):
    lines = " ".join(benchbox("plan", matrix).stdout.split())
    assert "backend=zero3 batch=1: zero3 refuses activation checkpointing" in lines
    assert "backend=zero3 batch=2: zero3 refuses activation checkpointing" in lines


def test_set_and_only_narrow_what_is_printed(benchbox, matrix):
    result = benchbox(
        "plan", matrix, "--set", "checkpointing=false,axes.batch=[1,2,4]", "--set", "measure.launches=1", "--only", "batch=4"
    )
    assert "2 cells x 1 launch = 2 launches" in result.stdout
    assert "skipped" not in result.stdout.replace("0 skipped", "")


def test_only_given_twice_selects_the_cells_for_which_both_hold(benchbox, matrix):
    sets = ("--set", "checkpointing=false")
    assert "4 cells x" in benchbox("plan", matrix, *sets).stdout
    assert "1 cell x" in benchbox("plan", matrix, *sets, "--only", "batch=2", "--only", "backend=zero3").stdout
    dry_run = benchbox("run", matrix, *sets, "--dry-run", "--only", "batch=2", "--only", "backend=zero3")
    assert "0 launches are done, 3 would run" in dry_run.stdout


def test_a_policy_folder_elsewhere_is_found_with_policy_dir(benchbox, matrix, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert benchbox("plan", matrix, cwd=elsewhere).returncode == 2
    assert benchbox("plan", matrix, "--policy-dir", tmp_path / "policies", cwd=elsewhere).returncode == 0


def test_a_wrong_matrix_is_one_line_a_problem_and_exit_code_2(benchbox, matrix):
    matrix.write_text(matrix.read_text().replace("zero3", "zer3").replace("tiny", "tny"))
    result = benchbox("plan", "trial.yaml")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: trial.yaml:3:7: unknown size 'tny'; did you mean 'tiny'?",
        "error: trial.yaml:6:25: unknown backend 'zer3'; did you mean 'zero3'?",
    ]


WIDE = "axes.seed=[0,1],axes.accumulation=[1,2],axes.batch=[1,2],world_size=null,axes.world_size=[2,4]"


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("sets", ["measure.steps=3", WIDE], ids=["narrow", "wide"])
def test_a_terminal_of_80_columns_shows_every_cell_whole(sets, estimate):
    matrix = MATRICES / "fsdp_vs_zero2.yaml"
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "benchbox.cli.app", "plan", str(matrix), "--set", sets, "--only", "cams=1"]
    command += ["--estimate"] * estimate
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=secondary, env=environment, cwd=MATRICES.parent) as process:
        os.close(secondary)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", "".join(iter(lambda: _read(primary), "")))
        assert process.wait(60) == 0
    os.close(primary)
    for cell in plan(load_matrix(matrix, parse_overrides([sets])), "cams=1").cells:
        assert re.search(rf"^{cell.cell_id}  .*{cell.backend}[ ,]", shown, re.MULTILINE)
    peaks = re.findall(r"(?:predicted\s+peak|^\w+ +\w+) +[\d.]+ MiB", shown, re.MULTILINE)
    assert bool(peaks) == estimate, shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 1 << 16).decode()
    except OSError:  # EIO: the other side is closed
        return ""


def test_a_plan_without_a_cell_that_can_run_still_says_why(matrix, capsys):
    loaded = load_matrix(matrix, {"axes.backend": "[zero3]"}, [matrix.parent / "policies"])
    print_plan(loaded, plan(loaded))
    printed = capsys.readouterr().out
    assert "0 cells x 3 launches = 0 launches" in printed
    assert "refuses activation checkpointing" in printed


def test_a_plan_of_which_nothing_can_run_names_each_cell_and_ends_with_exit_code_2(benchbox, matrix):
    """`plan --check` as well. The plans of other matrices are printed all the same."""
    alone = "axes.backend=[zero3],axes.batch=[1]"
    result = benchbox("plan", matrix, matrix, "--set", alone)
    assert result.stdout.count("\n  backend=zero3: zero3 refuses activation checkpointing") == 2
    assert result.returncode == 2
    assert result.stderr.splitlines()[0].startswith(f"error: {matrix}: no cell can run: zero3 refuses activation")
    check = benchbox("plan", matrix, "--check", "--set", alone)
    assert (check.returncode, check.stdout) == (2, "")
    assert "no cell can run" in check.stderr
    assert benchbox("plan", matrix, "--check").returncode == 0


def test_cameras_that_the_data_lack_are_noted(matrix, capsys):
    def printed(**overrides):
        loaded = load_matrix(matrix, {"checkpointing": "false", **overrides}, [matrix.parent / "policies"])
        print_plan(loaded, plan(loaded))
        return " ".join(capsys.readouterr().out.split())

    note = "the data have 4 cameras: with cams=7 the others are black and masked"
    assert note in printed(cams="7")
    assert "cameras:" not in printed(cams="4")
    assert "cameras:" not in printed(cams="7", data="synthetic")


def test_a_bundled_matrix_is_planned_by_its_name_from_an_empty_folder(benchbox):
    assert benchbox("plan", "fsdp_vs_zero2").stdout.startswith("fsdp_vs_zero2: in every cell policy=")
    unknown = benchbox("run", "fsdp_vs_zero", "--dry-run")
    hint = "did you mean 'fsdp_vs_zero2'?"
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f"error: fsdp_vs_zero: no such file, and none of that name in matrices; {hint}\n"


def test_walks_are_shown_with_the_largest_batch_that_theory_predicts(tmp_path, capsys):
    path = tmp_path / "walks.yaml"
    path.write_text(
        "name: walks\npolicy: pi05\nsize: tiny\ndata: synthetic\nworld_size: 2\n"
        "axes: {backend: [ddp, zero2], batch: {search: max, start: 2, at_most: 64}}\n"
    )
    loaded = load_matrix(path)
    planned = plan(loaded)
    first, second = planned.walks
    print_plan(loaded, planned, None, {first.cell_id: 48, second.cell_id: "no formula"})
    lines = capsys.readouterr().out.splitlines()
    assert " tokenizer=bytes, batch=2 and up cell " in " ".join(" ".join(lines).split())
    assert next(line for line in lines if line.startswith("cell")).endswith("  predicted largest batch")
    assert next(line for line in lines if line.startswith(first.cell_id)).endswith("  48")
    assert next(line for line in lines if line.startswith(second.cell_id)).endswith("  no formula")
    assert "2 walks to the largest batch that fits, each from batch 2 on, at most 64: `run`" in " ".join(lines)
    assert not any("launches of" in line for line in lines), "how many follow is not known"
