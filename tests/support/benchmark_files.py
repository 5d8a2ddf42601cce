"""Files as pytest-benchmark writes them, without measuring anything."""

from __future__ import annotations

from typing import Any


def benchmark_json(ratios: dict[str, dict[str, Any]], *, started: str = "2026-01-01T00:00:00") -> dict[str, Any]:
    """Return the content of a file of `pytest --benchmark-json`.

    Args:
        ratios: what every test recorded, by the name of the test.
        started: time of the run.
    """
    stats = {"min": 0.1, "median": 0.2, "max": 0.4, "rounds": 3, "mean": 0.2, "stddev": 0.1}
    return {
        "machine_info": {"cpu": {"brand_raw": "Example(R) CPU @ 2GHz", "count": 2}, "machine": "x86_64"},
        "commit_info": {"id": "0123456789abcdef", "dirty": False},
        "benchmarks": [
            {"fullname": f"tests/perf/test_example.py::{name}", "extra_info": {"ratios": entries}, "stats": stats}
            for name, entries in ratios.items()
        ],
        "datetime": started,
        "version": "5.2.3",
    }
