"""Texts of a training's progress, the rows that it follows, and the signals that stop it."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from benchbox.launch.follower import RowFollower
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.training import _StopRequests
from benchbox.launch.training_progress import TrainingProgress
from benchbox.registry.phases import RankState
from benchbox.spec.train import load_train

if TYPE_CHECKING:
    from pathlib import Path

ROW = {
    "step": 19,
    "loss": 1.25,
    "grad_norm": 2.5,
    "lr": 1e-3,
    "samples": 8,
    "flow": 0.75,
    "response": 0.5,
    "step_s": 0.5,
    "epoch": 0.125,
    "data_wait_s": 0.05,
    "allocated_peak_bytes": None,
    "reserved_peak_bytes": None,
    "host_rss_bytes": 2**30,
    "mfu": None,
    "mfu_reason": "no peak is known for this cpu",
}
FINDING = {"code": "BXP101", "severity": "error", "where": "adamw", "title": "stepped in 16 bits", "repair": "use masters"}


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


def progress(screen: io.StringIO, *, terminal: bool = False) -> TrainingProgress:
    console = Console(file=screen, force_terminal=terminal, width=140, height=20, color_system=None)
    return TrainingProgress(load_train("pi05"), console)  # 200 steps, a line every 20


def audit_row(*findings: dict[str, Any]) -> dict[str, Any]:
    return {"step": 20, "findings": list(findings), "numbers": {"edq": 0.99991}}


def test_a_log_gets_plain_lines_at_the_interval_and_for_the_last_step(screen: io.StringIO) -> None:
    shown = progress(screen)
    with shown.display():
        for step in (18, 19, 20):
            shown.metrics_row(ROW | {"step": step})
        shown.metrics_row(ROW | {"step": 199, "step_s": 8.0})
    assert screen.getvalue().splitlines() == [
        "text: every byte is a token; data: {tokenizer: PATH} names a tokenizer",
        "step 20/200  loss 1.2500  grad norm 2.500  lr 1.00e-03  16 samples/s  1:30 left",
        "step 200/200  loss 1.2500  grad norm 2.500  lr 1.00e-03  1 samples/s",
    ]


def test_a_terminal_shows_the_latest_step_with_everything_known_about_it(screen: io.StringIO) -> None:
    shown = progress(screen, terminal=True)
    with shown.display():
        shown.metrics_row(ROW)
    text = screen.getvalue()
    assert "step 20/200  epoch 0.12  1:30 left" in text
    assert "loss 1.2500 (flow 0.75, response 0.5)  grad norm 2.500  lr 1.00e-03" in text
    assert "16 samples/s  data wait 10%  host memory 1.00 GiB  MFU unknown: no peak is known for this cpu" in text
    assert "\nstep 20/200  loss" not in text, "no line of its own"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_skipped_step_whose_loss_is_not_finite_is_shown(screen: io.StringIO, terminal: bool) -> None:
    """In its row it is null."""
    shown = progress(screen, terminal=terminal)
    with shown.display():
        shown.metrics_row(ROW | {"loss": None, "grad_norm": None, "skipped": True})
    assert "loss not finite" in screen.getvalue()
    assert "grad norm not finite" in screen.getvalue()
    shown.validation_row({"step": 20, "loss": None, "terms": {"flow": None}, "samples": 4, "seconds": 1.0})
    assert "validation after 20 steps: loss not finite  flow not finite  4 samples" in screen.getvalue()


def test_a_terminal_shows_the_stage_before_the_first_step(screen: io.StringIO) -> None:
    shown = progress(screen, terminal=True)
    ranks = [Trace(0, state=RankState("train", 1, 200, None, 0.0)), Trace(1, state=RankState("prepare", None, None, None, 0.0))]
    with shown.display():
        shown.ranks_progressed(ranks)
    assert "pi05  prepare" in screen.getvalue()


def test_a_device_with_counters_shows_its_peak_memory_and_utilisation(screen: io.StringIO) -> None:
    """Made-up figures: no GPU was measured."""
    shown = progress(screen, terminal=True)
    with shown.display():
        shown.metrics_row(ROW | {"allocated_peak_bytes": 3 * 2**30, "mfu": 0.425})
    assert "peak memory 3.00 GiB  MFU 42.5%" in screen.getvalue()


@pytest.mark.parametrize("data_wait_s", [0.5, 0.6])
def test_no_more_than_the_whole_step_is_shown_as_waiting_for_data(screen: io.StringIO, data_wait_s: float) -> None:
    """Two clocks may differ by a little."""
    shown = progress(screen, terminal=True)
    with shown.display():
        shown.metrics_row(ROW | {"data_wait_s": data_wait_s})
    assert "data wait 100%" in screen.getvalue()


@pytest.mark.parametrize("severity", ["unknown", "warning"])
def test_what_an_audit_could_not_judge_is_shown_as_what_it_warns_of(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str], severity: str
) -> None:
    progress(screen).audit_row(audit_row(FINDING | {"severity": severity}))
    assert screen.getvalue() == ""
    assert capsys.readouterr().err == f"audit after step 20: {severity} BXP101 adamw: stepped in 16 bits; use masters\n"


def test_warnings_and_findings_are_lines(screen: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, beside the lines of the steps; an audit without errors and warnings says so on stdout."""
    shown = progress(screen)
    shown.metrics_row(ROW | {"warning": "tracker wandb failed"})
    shown.audit_row(audit_row(FINDING | {"severity": "info"}))
    shown.audit_row(audit_row(FINDING))
    assert screen.getvalue().splitlines()[-1] == "audit after step 20: no errors or warnings, effective descent quality 0.9999"
    assert capsys.readouterr().err.splitlines() == [
        "warning: tracker wandb failed",
        "audit after step 20: error BXP101 adamw: stepped in 16 bits; use masters",
    ]


def test_what_a_rank_warns_of_is_shown_once_also_after_a_restart(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = progress(screen)
    for trace in (Trace(0, warnings=["a task is cut"]), Trace(0, warnings=["a task is cut", "another one"])):
        shown.ranks_progressed([trace])
        shown.ranks_progressed([trace])
    assert capsys.readouterr().err == "warning: a task is cut\nwarning: another one\n"


def test_an_audit_of_skipped_steps_is_none_without_errors(screen: io.StringIO) -> None:
    progress(screen).audit_row(audit_row() | {"skipped": True})
    assert screen.getvalue() == "audit after step 20: not judged, all observed steps were skipped\n"


def test_an_audit_whose_observer_failed_is_no_audit_without_errors(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    progress(screen).audit_row(audit_row() | {"problems": ["rank 1: after_step: KeyError: 'eps'"]})
    assert "no errors" not in screen.getvalue()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "audit after step 20: the observer failed on rank 1: after_step: KeyError: 'eps': nothing was judged"
    )


@pytest.mark.parametrize(("every", "promise"), [("5", "with a checkpoint;"), ("0", "without a checkpoint (")])
def test_a_signal_promises_a_checkpoint_only_where_one_is_written(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str], every: str, promise: str
) -> None:
    shown = TrainingProgress(load_train("pi05", {"checkpoint.every": every}), Console(file=screen))
    shown.stop_requested("SIGTERM")
    assert f"SIGTERM: the training stops after this step {promise}" in capsys.readouterr().err


def test_new_rows_are_passed_on_once_and_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path, steps = tmp_path / "rows.jsonl", []
    follower = RowFollower(path, lambda row: steps.append(row["step"]), first_step=2)
    follower.read()
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)) + '{"step"')
    follower.read()
    follower.read()
    assert steps == [2, 3], "the steps before were taken before the training was resumed"
    with path.open("a") as stream:
        stream.write(': 4}\n{"step": 5}\n')
    follower.read()
    assert steps == [2, 3, 4, 5]


def test_the_first_signal_asks_a_training_and_the_second_ends_it(
    screen: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    received: list[str] = []
    requests = _StopRequests(received, progress(screen))
    requests.is_training = True
    assert (requests.ends(), requests.asks()) == (False, False)
    received.append("SIGTERM")
    assert (requests.ends(), requests.asks(), requests.asks()) == (False, True, True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "SIGTERM: the training stops after this step with a checkpoint; a second signal ends it at once"
    received.append("SIGINT")
    assert requests.ends()


def test_the_first_signal_ends_a_training_that_takes_no_steps_yet(screen: io.StringIO) -> None:
    assert _StopRequests(["SIGUSR1"], progress(screen)).ends()
