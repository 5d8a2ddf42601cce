"""Settings of backends and call sites of attention kernels in the observed section of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run
from tests.support.peaks import made_up_peaks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.store.peaks import MeasuredPeaks


def observed_of(**observed: Any) -> dict[str, str]:
    """Build a report of one cell whose launches observed these values, and return its observations by name."""
    records: list[Any] = [example_record(CELL, launch=launch) for launch in (1, 2)]
    for record in records:
        record["observed"] |= observed
    return {item.name: item.observed for item in build_report(example_run([CELL]), records).observed[0].observations}


def test_settings_of_the_backend_are_shown_by_name() -> None:
    settings = {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "reduce_bucket_size": 500, "comm_hook": None}
    assert observed_of(settings=settings)["backend settings"] == (
        "backward_prefetch=BACKWARD_PRE, forward_prefetch=no, reduce_bucket_size=500, comm_hook=null"
    )


def test_a_record_without_settings_has_no_line_for_them() -> None:
    assert "backend settings" not in observed_of()


def test_several_attention_kernels_are_shown_with_the_modules_that_called_them() -> None:
    sites = {"dit.layers.*": ["sdpa:flash_cpu"], "model.layers.*": ["eager"]}
    assert observed_of(attention_kernel="sdpa:flash_cpu+eager", attention_sites=sites)["attention"] == (
        "sdpa:flash_cpu+eager (sdpa:flash_cpu in dit.layers.*; eager in model.layers.*)"
    )
    one = {"model.layers.*": ["sdpa:flash_cpu"]}
    assert observed_of(attention_kernel="sdpa:flash_cpu", attention_sites=one)["attention"] == "sdpa:flash_cpu"


def test_the_share_of_the_measured_peak_is_that_of_one_rank_in_forward_and_backward() -> None:
    """2.4 GFLOP on two ranks in 70% of a mean step, against 400 GFLOP/s of bfloat16 products."""
    records: list[Any] = [example_record(CELL, launch=launch) for launch in (1, 2)]
    for record in records:
        record["environment"]["threads"] = 1
    peaks = {"2 cpu ranks with 1 thread": made_up_peaks()}

    def line(measured: Mapping[str, MeasuredPeaks], record: Any) -> str | None:
        report = build_report(example_run([CELL]), [record, records[1]], peaks=lambda _: measured)
        return {item.name: item.observed for item in report.observed[0].observations}.get("forward and backward")

    text = line(peaks, records[0])
    seconds = [sum(times["per_rank"][1]) for record in records for times in [record["step_time_s"]]]
    rate = 1.2e9 / (0.7 * sum(seconds) / 8)
    assert text is not None
    assert text.startswith(f"{rate / 1e9:.2f} GFLOP/s on each rank, {rate / 400e9:.0%} of the 400 GFLOP/s")
    assert line({}, records[0]) is None
    assert line({"4 cpu ranks with 1 thread": made_up_peaks(4)}, records[0]) is None


def test_a_share_is_left_out_where_the_optimizer_may_run_in_backward() -> None:
    record: Any = example_record(CELL)
    record["environment"]["threads"] = 1
    record["fused_phases"] = {"optimizer": "steps in backward"}
    report = build_report(example_run([CELL]), [record], peaks=lambda _: {"2 cpu ranks with 1 thread": made_up_peaks()})
    assert "forward and backward" not in {item.name for item in report.observed[0].observations}
