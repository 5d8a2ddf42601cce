"""Links with round numbers."""

from __future__ import annotations

from benchbox.store.links import LinkTimes, MeasuredLinks


def made_up_links(*, latency_s: float = 1e-3, bytes_per_s: float = 1e6) -> MeasuredLinks:
    """Return links between two ranks on which a call of B bytes takes `latency_s` + B / `bytes_per_s`, off by 20%."""
    times: LinkTimes = {
        "bytes": [1],
        "seconds": [1.0],
        "latency_s": latency_s,
        "bytes_per_s": bytes_per_s,
        "median_error": 0.2,
        "max_error": 0.5,
    }
    return MeasuredLinks(
        ranks=2,
        collectives=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "broadcast"), times),
        measured_at="2026-01-01T00:00:00+00:00",
        benchbox_version="1.0",
    )
