"""The launch record of a real GPU, pi05 in full size on an H200, is judged as what it is."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchbox.analysis.invariants import verify_records
from benchbox.analysis.summary import summarize
from benchbox.report.peak_share import peak_share_lines
from benchbox.spec.cell import Cell
from benchbox.store.peaks import read_peaks
from tests.support.example_run import example_run

FOLDER = Path(__file__).parents[3] / "reports" / "h200"


@pytest.fixture(scope="module")
def published() -> Any:
    return json.loads((FOLDER / "pi05_batch16.json").read_text())


@pytest.fixture
def record(published: Any) -> Any:
    return deepcopy(published)


def messages(record: Any) -> list[str]:
    return [violation.message for violation in verify_records([record]).violations]


def test_a_record_of_a_gpu_violates_nothing(record: Any) -> None:
    assert record["observed"]["device"] == ["NVIDIA H200"]
    assert {entry["device"] for entry in record["precision"]["census"]} == {"cuda:0"}
    assert messages(record) == []


def test_memory_and_moments_of_another_device_are_contradictions(record: Any) -> None:
    record["memory"]["source"] = "tensor_storage"
    moments = next(entry for entry in record["precision"]["census"] if entry["kind"] == "exp_avg")
    moments["device"] = "cpu"
    assert sorted(messages(record)) == [
        "memory of source tensor_storage, and the ranks ran on NVIDIA H200",
        "rank 0: exp_avg on cpu, the rank on NVIDIA H200",
    ]


def test_step_counts_may_be_on_the_cpu_where_no_kernel_reads_them(record: Any) -> None:
    count = next(entry for entry in record["precision"]["census"] if entry["kind"] == "step")
    count["device"] = "cpu"
    assert messages(record) == []


def test_forward_backward_and_the_optimizer_have_shares_of_what_the_device_can_do(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula divides the FLOPs that were counted: 41.1 of 124.6 TFLOP are of forward, which takes 117 ms."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "benchbox" / "peaks").mkdir(parents=True)
    (tmp_path / "benchbox" / "peaks" / "1x-nvidia-h200.json").write_text((FOLDER / "peaks.json").read_text())
    (summary,) = summarize(example_run([Cell.from_dict(record["cell"])]), [record])
    (line,) = peak_share_lines(summary, record, read_peaks("1x-nvidia-h200"))
    assert line == (
        "forward runs at 52% (353 TFLOP/s) and backward, recomputation included, at 61% (411 TFLOP/s) of what this device can "
        "do in products (677 TFLOP/s in bfloat16), the optimizer at 78% (3.00 TiB/s) of what its memory can do (3.86 TiB/s)"
    )
