"""Metrics by name. A metric is a declaration: its name, its unit, which way is better, and how it is read from a record.

Tables, thresholds, comparisons and the method section of a report all read this list, so a number has one definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from statistics import median
from typing import Any, Literal

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.registry.statuses import STATUSES

Record = Mapping[str, Any]
Value = float | str | None
Direction = Literal["lower", "higher", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number (or word) of one launch record. `formula` is the sentence a report prints of it."""

    name: str
    unit: str
    direction: Direction  # which way is better; none: only equality makes sense
    formula: str
    read: Callable[[Record], Value]
    launches: Literal["median", "worst"] = "median"  # how the values of several launches become that of a cell
    words: tuple[str, ...] = ()  # what a metric that is text can say

    @property
    def is_number(self) -> bool:
        return self.unit != "text"


def dotted(path: str) -> Callable[[Record], Value]:
    """A reader of one place of a record, `memory.worst.allocated_peak_bytes`; None where a key on the way is absent or null."""
    keys = path.split(".")

    def read(record: Record) -> Value:
        return reduce(lambda at, key: at.get(key) if isinstance(at, Mapping) else None, keys, record)  # type: ignore[return-value,arg-type]

    return read


def _median_slowest_step(record: Record) -> float | None:
    times = (record.get("step_time_s") or {}).get("slowest")
    return median(times) if times else None


def _last_loss(record: Record) -> float | None:
    losses = record.get("loss")
    return losses[-1] if losses else None


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="step_time_s",
            unit="s",
            direction="lower",
            formula="median over measured steps of the slowest rank's time for that step",
            read=_median_slowest_step,
        ),
        Metric(
            name="global_samples_per_s",
            unit="samples/s",
            direction="higher",
            formula="batch x accumulation x world_size / step_time_s",
            read=dotted("throughput.global_samples_per_s"),
        ),
        Metric(
            name="peak_allocated_bytes",
            unit="bytes",
            direction="lower",
            formula="most bytes held by tensors after warm-up, on the rank that held most",
            read=dotted("memory.worst.allocated_peak_bytes"),
            launches="worst",
        ),
        Metric(
            name="peak_reserved_bytes",
            unit="bytes",
            direction="lower",
            formula="most bytes the allocator took from the device after warm-up, on the rank that took most; null on CPU",
            read=dotted("memory.worst.reserved_peak_bytes"),
            launches="worst",
        ),
        Metric(
            name="mfu",
            unit="fraction",
            direction="higher",
            formula="model FLOPs a step / (step_time_s x world_size x the device's peak); null where the peak is unknown",
            read=dotted("mfu"),
        ),
        Metric(
            name="hfu",
            unit="fraction",
            direction="higher",
            formula="as mfu, of all FLOPs that the device did: recomputation is among them",
            read=dotted("hfu"),
        ),
        Metric(
            name="final_loss",
            unit="loss",
            direction="none",
            formula="training loss of the last step, mean over all ranks and micro-steps",
            read=_last_loss,
        ),
        Metric(
            name="edq",
            unit="ratio",
            direction="higher",
            formula="effective descent quality (arXiv:2405.03637), <u, what arrived> / |u|^2 over all tensors stepped, with u "
            "the updates that the optimizer's arithmetic gives in float32: 1 when every update arrives",
            read=dotted("precision.numbers.edq"),
        ),
        Metric(
            name="updates_lost",
            unit="fraction",
            direction="lower",
            formula="non-zero updates that left the stored weight bit for bit as it was / non-zero updates",
            read=dotted("precision.numbers.updates_lost"),
        ),
        Metric(
            name="second_moment_stalled",
            unit="fraction",
            direction="lower",
            formula="second moments v that v x beta2 rounds back to / v that are not zero; null where v is not 16-bit",
            read=dotted("precision.numbers.second_moment_stalled"),
        ),
        Metric(
            name="status",
            unit="text",
            direction="none",
            formula="how the launch ended: ok, or the type of its failure",
            read=dotted("status"),
            words=STATUSES,
        ),
    )
}


def metric(name: str) -> Metric:
    """The metric of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in METRICS:
        raise ConfigurationError(Problem("", f"unknown metric {name!r}", did_you_mean(name, METRICS)))
    return METRICS[name]
