"""Last lines and exit codes of commands that start ranks, by what became of these."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from benchbox.cli import run, train, validate
from benchbox.cli.run_job import check_job
from benchbox.errors import EXIT_CELL_FAILED, EXIT_THRESHOLD, EXIT_USAGE, CellFailedError
from benchbox.launch.runner import RunSummary
from benchbox.launch.slurm.job import JobState, SlurmJobError
from benchbox.launch.supervise.outcome import Outcome
from benchbox.plan import plan
from benchbox.spec import load_matrix
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.example_run import CELL, OOM, example_record, example_run

MATRIX = """
name: m
policy: pi05
size: tiny
data: synthetic
world_size: 1
backend: single
axes: {batch: [2]}
measure: {warmup_steps: 1, steps: 1, launches: 2}
"""
FAILED = {"type": "RuntimeError", "message": "it fell", "rank": 1, "phase": "backward", "traceback": None}


def test_a_stopped_run_names_the_command_that_resumes_it_without_beginning_anew(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["benchbox", "run", "my matrix.yaml", "--fresh", "--only", "cams=1"])
    for walks, least in ((False, ""), (True, "at least ")):
        with pytest.raises(typer.Exit) as stopped:
            run._exit(RunSummary(stopped=True, remaining=3, failed_cells={"a"}), tmp_path, 4, walks=walks)
        assert stopped.value.exit_code == 130
        command = "benchbox run 'my matrix.yaml' --only cams=1"
        assert capsys.readouterr().err == f"stopped with {least}3 launches left; resume with: {command}\n"


def test_a_run_says_that_its_budget_ended_and_how_many_cells_failed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["benchbox", "run", "my matrix.yaml", "--fresh", "--budget", "1m"])
    run._exit(RunSummary(), tmp_path, 4, walks=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(CellFailedError, match=f"2 of 4 cells did not end ok; records and logs of each rank: {tmp_path}/cells"):
        run._exit(RunSummary(out_of_time=True, remaining=5, failed_cells={"a", "b"}), tmp_path, 4, walks=False)
    text = "the budget ended with 5 launches left to the next look; continue with: benchbox run 'my matrix.yaml' --budget 1m\n"
    assert capsys.readouterr().out == text


def test_a_job_that_left_launches_failed_by_itself_or_was_ended_by_slurm(tmp_path):
    store, job = RunStore(tmp_path), SimpleNamespace(id=7, log="job-7.log")
    store.write_run(example_run([CELL]))
    store.write_record(example_record(status="oom", error=OOM))
    pending = [(CELL, 1)]
    with pytest.raises(CellFailedError, match=r"Slurm job 7: 1 launch did not end ok; output: job-7\.log"):
        check_job(job, JobState("FAILED"), pending, store)
    for state, launches in ((JobState("TIMEOUT", "TimeLimit"), pending), (JobState("COMPLETED"), [(CELL, 2)])):
        with pytest.raises(SlurmJobError, match=f"{state.state}.* with 1 launch left; the same command submits the rest"):
            check_job(job, state, launches, store)
    with pytest.raises(CellFailedError, match=r"Slurm job 7 failed, and no launch is missing; output: job-7\.log"):
        check_job(job, JobState("FAILED"), [], store)
    assert check_job(job, JobState("TIMEOUT"), [], store) is None
    with pytest.raises(SlurmJobError, match="Slurm job 7 ended TIMEOUT, and may not have measured all again"):
        check_job(job, JobState("TIMEOUT"), [], store, fresh=True)
    assert check_job(job, JobState("COMPLETED"), [], store, fresh=True) is None


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "FORGOTTEN"])
def test_a_job_that_did_not_complete_its_training_failed(state):
    job = SimpleNamespace(id=7, log="job-7.log")
    assert train._check_job(job, JobState("COMPLETED")) is None
    with pytest.raises(SlurmJobError, match=f"Slurm job 7 ended {state}; --resume submits the rest of the training"):
        train._check_job(job, JobState(state))


@pytest.mark.parametrize("planned", [True, False])
def test_a_fresh_run_that_is_stopped_leaves_no_figures_from_before(planned, tmp_path, monkeypatch):
    """They would be among those that its resume adds, also where the plan in between had other cells."""
    path, store = tmp_path / "m.yaml", RunStore(tmp_path / "run")
    path.write_text(MATRIX)
    (cell,) = plan(load_matrix(path)).cells
    store.write_run(example_run([cell], name="m"))
    for launch in (1, 2, 3):
        store.write_record(example_record(cell, launch))
    if not planned:
        store.write_run(example_run([replace(cell, batch=64)], name="m"))
    at_begin = []

    def stop(launches, **_):
        at_begin.append(list(store.records()))
        return RunSummary(stopped=True, remaining=len(launches))

    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", stop)
    done = run_in_process("run", path, "--out", store.path, "--fresh")
    assert done.returncode == 130
    assert "stopped with 2 launches left" in done.stderr
    assert at_begin == [[]], "the third launch, which is not asked for, included"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("RuntimeError", EXIT_CELL_FAILED),
        ("ConfigurationError", EXIT_USAGE),
        ("DataError", EXIT_USAGE),
        ("CheckpointError", EXIT_CELL_FAILED),
        ("ThresholdError", EXIT_THRESHOLD),
    ],
)
def test_a_training_that_failed_names_the_rank_the_newest_checkpoint_and_the_logs(kind, code, capsys, tmp_path):
    for steps in (5, 40):
        (tmp_path / "checkpoints" / f"step-{steps:08}").mkdir(parents=True)
    with pytest.raises(typer.Exit) as ended:
        train._exit(Outcome("crash", {**FAILED, "type": kind}), tmp_path)
    assert ended.value.exit_code == code
    newest = f"newest checkpoint: {tmp_path / 'checkpoints' / 'step-00000040'}"
    assert capsys.readouterr().err.splitlines() == [
        f"error: crash: {kind}: it fell (rank 1, backward); {newest}",
        f"error: logs of each rank: {tmp_path / 'launch'}",
    ]


def test_a_training_that_ended_or_was_stopped_says_how_to_go_on(capsys, tmp_path):
    train._exit(Outcome("ok"), tmp_path)
    assert capsys.readouterr().out == f"done; no checkpoint; metrics: {tmp_path / 'metrics.jsonl'}\n"
    checkpoint = tmp_path / "saved" / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    for folder, text in (
        (tmp_path, "no checkpoint"),
        (tmp_path / "saved", f"newest checkpoint: {checkpoint}; continue with --resume"),
    ):
        with pytest.raises(typer.Exit) as stopped:
            train._exit(Outcome("interrupted", {**FAILED, "message": "by the user"}), folder)
        assert stopped.value.exit_code == 130
        assert capsys.readouterr().err == f"stopped: by the user; {text}\n"
    for error, place in (({**FAILED, "phase": None}, " (rank 1, outside a step)"), ({**FAILED, "rank": None}, "")):
        with pytest.raises(typer.Exit):
            train._exit(Outcome("crash", error), tmp_path)
        assert capsys.readouterr().err.startswith(f"error: crash: RuntimeError: it fell{place}; no checkpoint\n")


def test_a_validation_prints_its_loss_its_terms_and_its_groups(capsys):
    record: dict[str, Any] = {
        "checkpoint": {"name": "step-00000040"},
        "evaluated_weights": "averages",
        "recipe": "bf16_master",
        "loss": 1.5,
        "terms": {"flow": 1.0},
        "parts": {"arm": 0.25},
        "samples": 1200,
        "episodes": 3,
        "seconds": 2.25,
        "reason": "another dataset: its statistics are its own",
        "groups": [
            {"dataset": "a", "control_mode": "joint", "loss": 1.0, "samples": 1000},
            {"dataset": "b", "control_mode": "unknown", "loss": 2.0, "samples": 200},
        ],
    }
    validate._print_record(record)
    assert capsys.readouterr().out.splitlines() == [
        "step-00000040, averages of the weights, bf16_master: loss 1.5000  flow 1.0000  arm 0.2500",
        "1,200 samples of 3 episodes in 2.2 s",
        "another dataset: its statistics are its own",
        "  a, joint: loss 1.0000 of 1,000 samples",
        "  b: loss 2.0000 of 200 samples",
    ]
    validate._print_record({**record, "evaluated_weights": "weights", "groups": (), "parts": {}})
    assert capsys.readouterr().out.startswith("step-00000040, bf16_master: loss 1.5000  flow 1.0000\n")
