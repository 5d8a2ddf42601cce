"""`metrics.jsonl` has one row per step of this run, also after an interruption."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.errors import NonFiniteError
from benchbox.session import StepResult
from benchbox.trainer.metrics import MetricsLog

if TYPE_CHECKING:
    from pathlib import Path


def result(loss: float = 0.5, grad_norm: float = 2.0, responses: int = 0) -> StepResult:
    """Return the result of a step over 8 samples, of which so many have a response."""
    parts = {"flow": torch.tensor(0.25), "response": torch.tensor(3.0 if responses else 0.0)}
    counts = {"flow": torch.tensor(8.0), "response": torch.tensor(float(responses))}
    return StepResult(torch.tensor(loss), torch.tensor(grad_norm), parts, 8, (1e-4, 1e-5), counts)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def open_log(path: Path, *, start: int = 0, block_steps: int = 2, is_writer: bool = True) -> MetricsLog:
    return MetricsLog(path, start=start, block_steps=block_steps, is_writer=is_writer)


def test_a_row_has_the_losses_norm_rate_samples_and_time_of_a_step(tmp_path: Path) -> None:
    log = open_log(tmp_path / "metrics.jsonl", block_steps=1)
    log.add(7, result())
    (row,) = rows(tmp_path / "metrics.jsonl")
    assert row.pop("step_s") > 0
    assert row == {"step": 7, "loss": 0.5, "grad_norm": 2.0, "lr": 1e-5, "samples": 8, "flow": 0.25}


def test_a_term_is_reported_for_the_steps_in_which_a_sample_has_it(tmp_path: Path) -> None:
    log = open_log(tmp_path / "metrics.jsonl")
    log.add(0, result(responses=0))
    log.add(1, result(responses=1))
    first, second = rows(tmp_path / "metrics.jsonl")
    assert "response" not in first
    assert second["response"] == 3.0
    assert first["flow"] == second["flow"] == 0.25


def test_rows_are_written_in_blocks_and_share_their_mean_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = open_log(path)
    log.add(0, result())
    assert not path.exists()
    log.add(1, result())
    log.add(2, result())
    assert [row["step"] for row in rows(path)] == [0, 1]
    log.flush()
    log.flush()  # an empty block
    assert [row["step"] for row in rows(path)] == [0, 1, 2]
    assert rows(path)[0]["step_s"] == rows(path)[1]["step_s"]


def test_steps_that_are_repeated_after_an_interruption_are_in_the_log_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    interrupted = open_log(path)
    for step in range(4):
        interrupted.add(step, result(loss=1.0))
    resumed = open_log(path, start=3)
    for step in range(3, 5):
        resumed.add(step, result(loss=2.0))
    assert [(row["step"], row["loss"]) for row in rows(path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize("torn", [-10, -1])
def test_a_row_that_was_not_written_to_its_end_is_removed(tmp_path: Path, torn: int) -> None:
    """A full disk leaves such a row, and an earlier benchbox may have gone on in its line."""
    path = tmp_path / "metrics.jsonl"
    log = open_log(path, block_steps=1)
    for step in range(3):
        log.add(step, result(loss=1.0))
    path.write_text(path.read_text()[:torn])
    open_log(path, start=3)
    assert [row["step"] for row in rows(path)] == [0, 1]
    path.write_text(path.read_text() + '{"step": 2, "lo{"step": 2, "loss": 1.0}\n')
    open_log(path, start=3)
    assert [row["step"] for row in rows(path)] == [0, 1]


def test_only_the_writer_touches_the_file(tmp_path: Path) -> None:
    """Another rank logs the same steps, and leaves the file of an interrupted run alone too."""
    path = tmp_path / "metrics.jsonl"
    log = open_log(path, block_steps=1)
    log.add(0, result())
    before = path.read_text()
    other_rank = open_log(path, block_steps=1, is_writer=False)
    other_rank.add(0, result())
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"loss": float("nan")}, "step 1: loss is nan"),
        ({"grad_norm": float("inf")}, "step 1: grad_norm is inf"),
    ],
)
@pytest.mark.parametrize("is_writer", [True, False])
def test_a_value_that_is_not_finite_is_an_error_on_every_rank_after_its_block_is_written(
    tmp_path: Path, bad: dict[str, float], message: str, is_writer: bool
) -> None:
    log = open_log(tmp_path / "metrics.jsonl", block_steps=3, is_writer=is_writer)
    log.add(0, result())
    log.add(1, result(**bad))
    with pytest.raises(NonFiniteError, match=message):
        log.add(2, result())
    assert (tmp_path / "metrics.jsonl").exists() == is_writer
    if is_writer:
        written = rows(tmp_path / "metrics.jsonl")
        assert [row["step"] for row in written] == [0, 1, 2]
        assert [written[1][name] for name in bad] == [None], "JSON has no such number"


def test_a_step_that_was_skipped_may_have_any_norm_and_its_row_says_so(tmp_path: Path) -> None:
    log = open_log(tmp_path / "metrics.jsonl")
    log.add(0, replace(result(grad_norm=float("inf")), skipped=True))
    log.add(1, result())
    first, second = rows(tmp_path / "metrics.jsonl")
    assert (first["skipped"], first["grad_norm"]) == (True, None)
    assert "skipped" not in second


def test_the_time_of_a_step_is_the_mean_of_its_block_since_the_block_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    log = open_log(tmp_path / "metrics.jsonl")
    for step, seconds in enumerate((0.5, 1.5, 2.0, 4.0)):
        now_s[0] += seconds
        log.add(step, result())
    assert [row["step_s"] for row in rows(tmp_path / "metrics.jsonl")] == [1.0, 1.0, 3.0, 3.0]


def test_activities_between_steps_are_no_time_of_steps_and_are_in_the_first_row_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    log = open_log(tmp_path / "metrics.jsonl")
    for step in range(5):
        now_s[0] += 1.0
        log.add(step, result())
        if step == 2:  # within a block, which is written before
            for activity, seconds in (("validation", 60.0), ("checkpoint", 5.0)):
                with log.outside_steps(activity):
                    assert len(rows(tmp_path / "metrics.jsonl")) == 3
                    now_s[0] += seconds
    written = rows(tmp_path / "metrics.jsonl")
    assert [row["step_s"] for row in written] == [1.0] * 5
    outside_s = {"validation": 60.0, "checkpoint": 5.0}
    assert [row.get("outside_steps_s") for row in written] == [None, None, None, outside_s, None]


def test_warnings_are_in_the_last_row_of_the_block_before_which_they_arose(tmp_path: Path) -> None:
    warnings = [["a link failed", "a folder stays"], []]
    options: dict[str, Any] = {"start": 0, "block_steps": 2, "is_writer": True}
    log = MetricsLog(tmp_path / "metrics.jsonl", take_warnings=lambda: warnings.pop(0), **options)
    for step in range(4):
        log.add(step, result())
    assert [row.get("warning") for row in rows(tmp_path / "metrics.jsonl")] == [
        None,
        "a link failed; a folder stays",
        None,
        None,
    ]


def test_a_block_in_which_no_sample_has_a_part_of_the_loss_is_warned_of_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = open_log(path)
    nothing = replace(result(loss=0.0), part_counts={"flow": torch.tensor(0.0), "response": torch.tensor(0.0)})
    for step, taken in enumerate([result(), nothing, nothing, nothing, nothing, nothing]):
        log.add(step, taken)
    warnings = [row.get("warning") for row in rows(path)]
    warning = warnings.pop(3)
    assert warnings == [None] * 5, "one step of the first block learned something"
    assert warning.startswith("no sample of steps 2 to 3 has what a part of the loss (flow, response) is computed from")


def test_a_loss_without_parts_is_not_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    open_log(path, block_steps=1).add(0, replace(result(), parts={}, part_counts={}))
    assert "warning" not in rows(path)[0]
