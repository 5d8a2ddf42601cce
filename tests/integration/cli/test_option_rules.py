"""Options of `run` and `train` that need one another, or that one another rules out: one line and exit code 2."""

from __future__ import annotations

import shlex

import pytest

from benchbox.errors import EXIT_OK, EXIT_USAGE

MATRIX = """\
name: trial
policy: pi05
size: tiny
data: synthetic
world_size: 2
batch: 1
axes: {backend: [ddp, zero3]}
measure: {warmup_steps: 1, steps: 2, launches: 3}
"""
TRAINING = "name: trial\npolicy: pi05\nsize: tiny\nbackend: single\nworld_size: 1\ndata: synthetic\nbatch: 1\nsteps: 4\n"


@pytest.fixture(autouse=True)
def files(tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX)
    (tmp_path / "t.yaml").write_text(TRAINING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "m.yaml", "--budget", "10m"),
            "error: --budget is for --launches auto: ",
        ),
        (("run", "m.yaml", "--resolution", "5%"), "error: --resolution is for --launches auto: "),
        (("run", "m.yaml", "--launches", "auto"), "error: --launches auto tests pairs with the reference of the matrix"),
        (
            ("run", "m.yaml", "--launches", "auto", "--set", "reference={backend: ddp}", "--resolution", ""),
            "error: --resolution: '' is no percentage; write it as 2%",
        ),
        (
            ("run", "m.yaml", "--set", "checkpointing=true", "--only", "backend=zero3"),
            "error: m.yaml: no cell can run: zero3",
        ),
        (("train", "t.yaml", "--from", "runs/trial"), "error: --from RUN and --cell ID go together"),
        (("train", "--cell", "0"), "error: --from RUN and --cell ID go together"),
        (("train",), "error: give a training file, or the set-up of a measured cell: --from RUN --cell ID --steps N"),
        (
            ("train", "t.yaml", "--set", "backend=ddp,world_size=4", "--launcher", "slurm", "--slurm", "nodes=3", "--dry-run"),
            "error: --set world_size=4: 4 ranks cannot be divided equally among 3 nodes",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(benchbox, arguments, message, tmp_path):
    refused = benchbox(*arguments)
    assert (refused.returncode, refused.stdout) == (EXIT_USAGE, "")
    assert refused.stderr.startswith(message)
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_training_prints_the_script_of_its_job(benchbox, tmp_path):
    options = ("--resume", "--max-restarts", "3", "--launcher", "slurm", "--slurm", "partition=p")
    done = benchbox("train", "t.yaml", "--dry-run", *options)
    assert done.returncode == EXIT_OK, done.stderr
    assert done.stdout.startswith("trial: cell ")
    script = done.stdout[done.stdout.index("#!/bin/bash") :]
    assert "#SBATCH --partition=p\n" in script
    (command,) = [line for line in script.splitlines() if "benchbox.cli.app" in line]
    words = shlex.split(command)
    assert words[3:5] == ["train", str(tmp_path / "t.yaml")]
    assert "--resume" in words
    assert words[words.index("--max-restarts") + 1] == "3"
    assert not (tmp_path / "runs").exists()


def test_without_a_gpu_a_search_needs_a_limit_of_memory_to_run_but_not_to_be_planned(benchbox, tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.launch.process.environment.has_cuda_device", lambda _: False)
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", None)  # it would take all the memory of the host
    search = MATRIX.replace("batch: 1\n", "").replace("zero3]", "zero3], batch: {search: max}")
    (tmp_path / "m.yaml").write_text(search)
    planned = benchbox("run", "m.yaml", "--dry-run")
    assert planned.returncode == EXIT_OK, planned.stderr
    refused = benchbox("run", "m.yaml")
    assert (refused.returncode, refused.stdout) == (EXIT_USAGE, "")
    assert refused.stderr.startswith("error: m.yaml:6:")
    assert ": without a GPU a search needs measure.memory_limit" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_a_figure_is_drawn_of_a_dry_run_only(benchbox, tmp_path):
    refused = benchbox("train", "t.yaml", "--figure", "rates.svg")
    assert refused.returncode == EXIT_USAGE
    assert "draws the schedule of --dry-run only" in " ".join(refused.stderr.split())
    assert not (tmp_path / "rates.svg").exists()
    unwritable = benchbox("train", "t.yaml", "--dry-run", "--figure", "absent/rates.svg")
    assert unwritable.stderr == "error: --figure absent/rates.svg: cannot be written: No such file or directory\n"


def test_a_dry_run_of_looks_says_how_many_launches_there_are_at_most(benchbox):
    auto = benchbox("run", "m.yaml", "--launches", "auto", "--set", "reference={backend: ddp}", "--dry-run", "--out", "r")
    assert auto.returncode == EXIT_OK, auto.stderr
    assert auto.stdout.endswith("in r: 0 launches are done, 80 would run at most\n")
    fixed = benchbox("run", "m.yaml", "--launches", "5", "--dry-run")
    assert fixed.stdout.endswith("in runs/trial: 0 launches are done, 10 would run\n")
