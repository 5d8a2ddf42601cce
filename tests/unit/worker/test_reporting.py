"""Events of a rank: progress at stages and steps, and exceptions described by type."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchbox.errors import MismatchError, NonFiniteError, UnsupportedError
from benchbox.measure.phases import ProgressTracker
from benchbox.registry.phases import RankState
from benchbox.registry.statuses import STATUSES
from benchbox.store.events import EventWriter, read_events
from benchbox.worker.reporting import Reporter, describe_error
from tests.unit.worker.test_out_of_memory import NCCL_OUT_OF_MEMORY

if TYPE_CHECKING:
    from pathlib import Path

GLOO_CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:19264"
STATE = RankState("measure", 3, 10, "clip", 0.0)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (MemoryError(), "oom"),
        (MismatchError("another backend"), "mismatch"),
        (NonFiniteError("loss is nan"), "nan"),
        (UnsupportedError("no kernel"), "unsupported"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("CUDA out of memory"), "crash"),  # torch raises OutOfMemoryError with this text, never RuntimeError
        (SystemExit(1), "crash"),
        (dist.DistBackendError("connection closed by peer"), "crash"),
    ],
)
def test_the_status_of_an_error_follows_from_its_class(error: BaseException, status: str) -> None:
    event = describe_error(error, STATE)
    assert event["status"] == status
    assert event["status"] in STATUSES
    assert (event["type"], event["message"]) == (type(error).__name__, str(error))
    assert (event["stage"], event["step"], event["phase"]) == ("measure", 3, "clip")


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (dist.DistBackendError("connection closed by peer"), True),
        (dist.DistNetworkError("connection reset by peer"), True),
        (RuntimeError(GLOO_CLOSED), True),
        (RuntimeError("connection closed by peer"), False),
        (ValueError(GLOO_CLOSED), False),
        (MismatchError("another backend"), False),
    ],
)
def test_only_an_error_of_a_collective_is_secondary(error: BaseException, secondary: bool) -> None:
    """The launcher looks for the failure of another rank before it blames a rank whose collective broke."""
    assert describe_error(error, STATE)["secondary"] is secondary


def test_a_collective_that_ran_out_of_memory_is_the_failure_of_its_own_rank() -> None:
    event = describe_error(dist.DistBackendError(NCCL_OUT_OF_MEMORY), STATE)
    assert (event["status"], event["secondary"]) == ("oom", False)


def test_an_error_that_is_both_ours_and_of_a_collective_is_primary() -> None:
    class BothError(MismatchError, dist.DistBackendError): ...

    event = describe_error(BothError("checked by a collective"), STATE)
    assert (event["status"], event["secondary"]) == ("mismatch", False)


def test_an_error_carries_the_traceback_of_where_it_was_raised() -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    try:
        fail()
    except RuntimeError as error:
        event = describe_error(error, STATE)
    assert "in fail" in event["traceback"]
    assert event["traceback"].endswith("RuntimeError: boom\n")


def test_a_path_that_is_not_utf_8_is_named_by_an_escape() -> None:
    """Neither a report nor a table could be written of it as Python keeps it."""

    def fail() -> None:
        raise MismatchError(os.fsdecode(b"caf\xe9: another backend"))

    try:
        fail()
    except MismatchError as error:
        event = describe_error(error, STATE)
    assert event["message"] == r"caf\udce9: another backend"
    assert event["traceback"].endswith("caf\\udce9: another backend\n")


def test_progress_is_reported_at_every_stage_and_step(tmp_path: Path) -> None:
    tracker = ProgressTracker()
    reporter = Reporter(tracker, EventWriter(tmp_path / "events.jsonl", rank=1))
    reporter.enter_stage("build")
    reporter.enter_stage("measure", 2)
    with tracker.step(), tracker.phase("forward"):
        pass
    reporter.report_progress()
    events, _ = read_events(tmp_path / "events.jsonl")
    assert [{key: event[key] for key in event if key not in ("t", "monotonic_s")} for event in events] == [
        {"rank": 1, "event": "progress", "stage": "build", "step": None, "of": None, "phase": None},
        {"rank": 1, "event": "progress", "stage": "measure", "step": None, "of": 2, "phase": None},
        {"rank": 1, "event": "progress", "stage": "measure", "step": 1, "of": 2, "phase": None},
    ]
    assert tracker.state[:4] == ("measure", 1, 2, None)
