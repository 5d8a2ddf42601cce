"""Metrics by name. A metric is a declaration: its name, its unit, which direction is better, and how it is read from a record.

Tables, thresholds, comparisons and the method section of a report all read this list, so a number has one definition. Other
packages add metrics through the entry-point group `benchbox.metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Literal

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.extensions import with_extensions
from benchbox.registry.names import did_you_mean
from benchbox.registry.statuses import DIVERGED, STATUSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.launch_record import LaunchRecord

MetricValue = float | str | None
Direction = Literal["lower", "higher", "none"]

GROUP = "benchbox.metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number (or word) of one launch record. `formula` is the sentence that a report prints about it."""

    name: str
    unit: str  # "text" for a word
    direction: Direction  # which direction is better; none: only equality makes sense
    formula: str
    read: Callable[[LaunchRecord], MetricValue]
    launches: Literal["median", "worst"] = "median"  # how the values of several launches become that of a cell
    deterministic: bool = False  # equal launches have equal values, up to rounding
    words: tuple[str, ...] = ()  # possible values of a metric that is a word
    across_batches: bool = False  # values of different batches can be compared, as those of a throughput

    @property
    def is_number(self) -> bool:
        return self.unit != "text"


def _step_time(record: LaunchRecord) -> float | None:
    times = record["step_time_s"]
    return median(times["slowest"]) if times and times["slowest"] else None


def _samples_per_s(record: LaunchRecord) -> float | None:
    throughput = record["throughput"]
    return throughput["global_samples_per_s"] if throughput else None


def _peak_allocated(record: LaunchRecord) -> int | None:
    memory = record["memory"]
    return memory["worst"]["allocated_peak_bytes"] if memory else None


def _peak_reserved(record: LaunchRecord) -> int | None:
    memory = record["memory"]
    return memory["worst"]["reserved_peak_bytes"] if memory else None


def _compile_time(record: LaunchRecord) -> float | None:
    compilation = record.get("compilation")
    return max(rank["time_s"] for rank in compilation["per_rank"]) if compilation else None


def _final_loss(record: LaunchRecord) -> float | None:
    losses = record["loss"]
    return losses[-1] if losses else None


def _audited(name: str) -> Callable[[LaunchRecord], float | None]:
    """Return a reader of one of the numbers that the precision audit computes over all ranks."""

    def read(record: LaunchRecord) -> float | None:
        precision = record["precision"]
        return (precision.get("numbers") or {}).get(name) if precision else None

    return read


BUILT_IN_METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="step_time_s",
            unit="s",
            direction="lower",
            formula="median over measured steps of the slowest rank's time for that step",
            read=_step_time,
        ),
        Metric(
            name="global_samples_per_s",
            unit="samples/s",
            direction="higher",
            formula="batch x accumulation x world_size / step_time_s",
            read=_samples_per_s,
            across_batches=True,
        ),
        Metric(
            name="peak_allocated_bytes",
            unit="bytes",
            direction="lower",
            formula="most bytes held by tensors after warm-up, on the rank that held most",
            read=_peak_allocated,
            launches="worst",
        ),
        Metric(
            name="peak_reserved_bytes",
            unit="bytes",
            direction="lower",
            formula="most bytes the allocator took from the device after warm-up, on the rank that took most; null on CPU",
            read=_peak_reserved,
            launches="worst",
        ),
        Metric(
            name="compile_time_s",
            unit="s",
            direction="lower",
            formula="time that torch.compile took until the end of the measured steps, on the rank that took longest; null "
            "where nothing was compiled",
            read=_compile_time,
        ),
        Metric(
            name="mfu",
            unit="fraction",
            direction="higher",
            formula="the least over ranks of a rank's model FLOPs a step / (its median step time x the device's peak); null "
            "where the peak is unknown; each step by its own FLOPs under padding: longest",
            read=lambda record: record["mfu"],
            across_batches=True,
        ),
        Metric(
            name="hfu",
            unit="fraction",
            direction="higher",
            formula="as mfu, of all FLOPs that the device did: recomputation is among them",
            read=lambda record: record.get("hfu"),
            across_batches=True,
        ),
        Metric(
            name="final_loss",
            unit="loss",
            direction="none",
            formula="training loss of the last step, mean over all ranks and micro-steps",
            read=_final_loss,
        ),
        Metric(
            name="edq",
            unit="ratio",
            direction="higher",
            formula="effective descent quality (arXiv:2405.03637), <u, what arrived> / |u|^2 over all tensors stepped, with u "
            "the updates that the optimizer's arithmetic gives in float32: 1 when every update arrives",
            read=_audited("edq"),
            deterministic=True,
        ),
        Metric(
            name="updates_lost",
            unit="fraction",
            direction="lower",
            formula="non-zero updates that left the stored weight bit for bit as it was / non-zero updates",
            read=_audited("updates_lost"),
            deterministic=True,
        ),
        Metric(
            name="second_moment_stalled",
            unit="fraction",
            direction="lower",
            formula="second moments v that v x beta2 rounds back to / v that are not zero; null where v is not 16-bit",
            read=_audited("second_moment_stalled"),
            deterministic=True,
        ),
        Metric(
            name="status",
            unit="text",
            direction="none",
            formula="how the launch ended: ok, or the type of its failure; of a cell also diverged, where it trains unlike the "
            "reference",
            read=lambda record: record["status"],
            words=(*STATUSES, DIVERGED),
        ),
    )
}


@cache
def metrics() -> dict[str, Metric]:
    """Return every metric by name: the built-in ones, then those of the entry-point group `benchbox.metrics`.

    Raises:
        ConfigurationError: an entry point cannot be loaded, is not a `Metric`, or has a name that is already taken.
    """
    return with_extensions(GROUP, Metric, BUILT_IN_METRICS)


def metric_by_name(name: str) -> Metric:
    """Return the metric with that name.

    Raises:
        ConfigurationError: no metric has this name.
    """
    if name not in metrics():
        raise ConfigurationError(Problem("", f"unknown metric {name!r}", did_you_mean(name, metrics())))
    return metrics()[name]
