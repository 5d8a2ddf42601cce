"""Peaks with round numbers."""

from __future__ import annotations

from benchbox.store.peaks import MeasuredPeaks, MeasuredRate


def rate(per_s: float) -> MeasuredRate:
    return {"per_s": per_s, "spread": 0.01, "repetitions": 5, "size": [1]}


def made_up_peaks(ranks: int = 2) -> MeasuredPeaks:
    """Return peaks of 100 GFLOP/s in float32 and 400 in bfloat16, less in other shapes, and 10 GB/s of updates in place."""
    return MeasuredPeaks(
        device="cpu",
        ranks=ranks,
        threads=1,
        matmul={
            "float32": {"large": rate(100e9), "thin": rate(50e9), "batched": rate(25e9)},
            "bfloat16": {"large": rate(400e9), "thin": rate(100e9), "batched": rate(50e9)},
        },
        copy=rate(8e9),
        update=rate(10e9),
        all_reduce=rate(1e9) if ranks > 1 else None,
        torch="2.13.0",
        measured_at="2026-01-01T00:00:00+00:00",
        benchbox_version="1.0",
    )
