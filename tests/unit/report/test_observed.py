"""Settings of backends and call sites of attention kernels in the observed section of a report."""

from __future__ import annotations

from typing import Any

from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run


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
