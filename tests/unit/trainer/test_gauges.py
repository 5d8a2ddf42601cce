"""Values of a row besides the results of its step."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.measure import phases
from benchbox.measure.phases import PHASES, CombinedInstrument
from benchbox.trainer.gauges import DataWaitClock, TrainingGauges
from benchbox.trainer.metrics import MetricsLog
from tests.unit.trainer.test_metrics import result

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


class FakeTime:
    """Clock of the gauges that only a test advances."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        patch.setattr(time, "perf_counter", lambda: self.now_s)


def take_steps(clock: DataWaitClock, waits_s: list[list[float]], host: FakeTime | None = None) -> None:
    """Take steps of micro-batches that are waited for this long; another phase takes as long again."""
    instrument = CombinedInstrument(clock)
    for micro_batches in waits_s:
        with instrument.step():
            for wait_s in micro_batches:
                for phase in PHASES[:2]:
                    with instrument.phase(phase):
                        if host is not None:
                            host.now_s += wait_s


def gauges(clock: DataWaitClock, samples_per_epoch: int | None = 100) -> TrainingGauges:
    return TrainingGauges(
        clock,
        CPU,
        samples_per_step=8,
        samples_per_epoch=samples_per_epoch,
        mfu=lambda step_s: (None, "no peak is known") if step_s < 1 else (0.5 / step_s, None),
    )


def test_the_waits_of_a_steps_micro_batches_add_up_and_other_phases_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DataWaitClock(CPU)
    take_steps(clock, [[0.0], [0.25, 0.5]], FakeTime(monkeypatch))
    assert clock.drain() == [0.0, 0.75]
    assert clock.drain() == []


def test_a_wait_of_the_host_in_which_the_device_is_busy_is_no_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host runs ahead of a CUDA device, whose stream here idles for a quarter of each wait."""
    host = FakeTime(monkeypatch)

    class FakeStreamTimer:
        mark = staticmethod(lambda: host.now_s / 4)
        elapsed_s = staticmethod(lambda start, end: end - start)
        synchronize = staticmethod(lambda mark: None)

    monkeypatch.setattr(phases, "_CudaTimer", FakeStreamTimer)
    clock = DataWaitClock(torch.device("cuda"))
    take_steps(clock, [[0.25, 0.75], [0.0]], host)
    assert clock.drain() == [0.25, 0.0]


def test_the_epoch_counts_samples_of_all_ranks_and_is_unknown_with_weights() -> None:
    clock = DataWaitClock(CPU)
    take_steps(clock, [[0.0], [0.0]])
    assert [row["epoch"] for row in gauges(clock).read([11, 12], 0.5)] == [0.96, 1.04]
    take_steps(clock, [[0.0]])
    assert gauges(clock, samples_per_epoch=None).read([0], 0.5)[0]["epoch"] is None


def test_unknown_utilisation_has_its_reason_once() -> None:
    clock = DataWaitClock(CPU)
    take_steps(clock, [[0.0]] * 2)
    values = gauges(clock)
    first, second = values.read([0, 1], 0.5)
    assert (first["mfu"], first["mfu_reason"]) == (None, "no peak is known")
    assert "mfu_reason" not in second
    take_steps(clock, [[0.0]] * 2)
    assert [row.get("mfu_reason") for row in values.read([2, 3], 0.5)] == [None, None]


def test_utilisation_is_that_of_the_mean_step_of_the_block() -> None:
    clock = DataWaitClock(CPU)
    take_steps(clock, [[0.0]])
    (row,) = gauges(clock).read([0], 2.0)
    assert row["mfu"] == 0.25
    assert "mfu_reason" not in row


def test_peaks_are_those_of_steps_and_not_of_a_validation_or_of_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device holds 10 bytes between its peaks."""
    peak = {"bytes": 90}  # of construction

    def read_peak(_: torch.device) -> dict[str, int]:
        return {"allocated_peak_bytes": peak["bytes"], "reserved_peak_bytes": peak["bytes"]}

    monkeypatch.setattr("benchbox.trainer.gauges.peak_memory", read_peak)
    monkeypatch.setattr("benchbox.trainer.gauges.reset_peak_memory", lambda _: peak.update(bytes=10))
    clock = DataWaitClock(CPU)
    log = MetricsLog(tmp_path / "metrics.jsonl", start=0, block_steps=1, is_writer=True, gauges=gauges(clock))
    for step in range(3):
        take_steps(clock, [[0.0]])
        peak["bytes"] = max(peak["bytes"], 20 + step)
        log.add(step, result())
        with log.outside_steps("validation"):
            peak["bytes"] = 80
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["allocated_peak_bytes"] for row in rows] == [20, 21, 22]
    assert [row["reserved_peak_bytes"] for row in rows] == [20, 21, 22]


def test_this_device_counts_no_memory_and_the_host_does() -> None:
    clock = DataWaitClock(CPU)
    take_steps(clock, [[0.0]])
    (row,) = gauges(clock).read([0], 0.5)
    assert (row["allocated_peak_bytes"], row["reserved_peak_bytes"]) == (None, None)
    assert row["host_rss_bytes"] == pytest.approx(gauges(clock)._process.memory_info().rss, rel=0.1)
