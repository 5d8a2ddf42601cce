"""The section of a report on walks: certificates, the throughput at every batch, and set-ups at their fastest batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.analysis.certificates import ENDED, Certificate, mean_probes
from benchbox.analysis.quantities import UNKNOWN, quantity, significant
from benchbox.analysis.summary import label
from benchbox.report.headline import evidence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.analysis.comparability import Comparison

HEADERS = (
    "set-up",
    "largest batch that fits",
    "predicted",
    "peak",
    "headroom",
    "first that does not fit",
    "allocation retries",
    "samples/s by batch",
    "launches",
)
BEST_HEADERS = ("set-up", "fastest batch", "of the reference", "samples/s over the reference's", "evidence")
BEST_NOTE = (
    "Every set-up at the fastest batch of its walk. The batch is chosen here and not compared: a ratio is that of the set-ups "
    "with their batches, and not of the set-ups alone. The launch that chose a batch counts only where there is no other."
)


@dataclass(frozen=True, slots=True)
class BatchRate:
    """Throughput at one batch that was tried."""

    batch: str
    rate: str  # or the status
    is_peak: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateView:
    """Result of one walk as text."""

    setup: str
    largest: str
    predicted: str
    peak: str
    headroom: str
    beyond: str
    failure: str  # rank, phase and operation of the error of `beyond`
    retries: str
    rates: tuple[BatchRate, ...]
    launches: str
    reason: str  # why there is no certificate; empty where there is one

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of the row under `HEADERS` without markup; the peak of the throughput has a star."""
        largest = f"{self.largest} ({self.reason})" if self.reason else self.largest
        beyond = f"{self.beyond} ({self.failure})" if self.failure else self.beyond
        rates = ", ".join(f"{entry.batch}: {entry.rate}{'*' if entry.is_peak else ''}" for entry in self.rates)
        return (
            self.setup, largest, self.predicted, self.peak, self.headroom, beyond, self.retries, rates, self.launches,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkSection:
    """Certificates of all walks of a run, and rows under `BEST_HEADERS`."""

    summary: str
    certificates: tuple[CertificateView, ...]
    notes: tuple[str, ...]
    best: tuple[tuple[str, ...], ...]
    headers: tuple[str, ...] = HEADERS
    best_headers: tuple[str, ...] = BEST_HEADERS
    best_note: str = BEST_NOTE


def walk_section(results: Sequence[Certificate], best: Sequence[Comparison], axes: Sequence[str]) -> WalkSection | None:
    """Return the section, or None for a run without walks. `axes` are the fields that vary."""
    if not results:
        return None
    fields = [field for field in axes if field != "batch"]
    reasons = dict.fromkeys(result.retries_reason for result in results if result.largest and result.retries_reason)
    return WalkSection(
        summary=_summary(results),
        certificates=tuple(_view(result, fields) for result in results),
        notes=(*(f"Allocation retries are unknown: {reason}." for reason in reasons), *_star_notes(results)),
        best=tuple(_best_row(comparison, fields) for comparison in best),
    )


def _star_notes(results: Sequence[Certificate]) -> list[str]:
    """Return what a star means, where it is not at the highest rate that is shown: repeats of the fastest batch were slower."""
    for result in results:
        rates = [spread.value for summary in result.batches if (spread := summary.values["global_samples_per_s"])]
        starred = result.fastest and result.fastest.values["global_samples_per_s"]
        if starred and starred.value < max(rates):
            return ["Rates are medians of launches. A star marks the batch that was fastest in the launches that searched."]
    return []


def _summary(results: Sequence[Certificate]) -> str:
    complete = sum(result.is_complete for result in results)
    probes, launches = mean_probes(results), sum(result.launches for result in results)
    repeats = launches - sum(result.probes for result in results)
    limits = dict.fromkeys(quantity(result.limit_bytes, "bytes") for result in results if result.limit_bytes is not None)
    limit = f" A rank may use {' or '.join(limits)}." if limits else ""
    again = f"; {repeats} more repeat the fastest batch of each walk" if repeats else ""
    those = "They" if all(result.search in ENDED for result in results) else "Those that ended"
    searched = "" if probes is None else f" {those} took {significant(probes)} launches each on average{again}."
    return (
        f"{complete} of {len(results)} walks have a certificate: launches of their own show the largest batch that fits, and "
        f"that one more does not.{limit}{searched}"
    )


def _view(result: Certificate, fields: Sequence[str]) -> CertificateView:
    error = result.error
    failure = ""
    if error is not None:
        operation = error.get("operation") or "operation unknown"
        phase = error["phase"] or error.get("stage") or "phase unknown"
        failure = f"rank {error['rank']}, {phase}, {operation}"
    repeats = result.launches - result.probes
    retries = result.allocation_retries
    return CertificateView(
        setup=label(result.batches[0].cell, fields),
        largest=UNKNOWN if result.largest is None else str(result.largest.cell["batch"]),
        predicted=UNKNOWN if result.predicted_batch is None else str(result.predicted_batch),
        peak=quantity(result.peak_bytes, "bytes"),
        headroom=quantity(result.headroom_bytes, "bytes"),
        beyond=UNKNOWN if result.beyond is None else str(result.beyond.cell["batch"]),
        failure=failure,
        retries=UNKNOWN if retries is None else str(retries),
        rates=tuple(_rates(result)),
        launches=f"{result.probes} + {repeats}" if repeats else str(result.probes),
        reason=result.reason or "",
    )


def _rates(result: Certificate) -> list[BatchRate]:
    rates = []
    for summary in result.batches:
        spread = summary.values["global_samples_per_s"]
        rate = summary.status if spread is None else significant(spread.value)
        rates.append(BatchRate(str(summary.cell["batch"]), rate, summary is result.fastest))
    return rates


def _best_row(comparison: Comparison, fields: Sequence[str]) -> tuple[str, ...]:
    batches = [str(summary.cell["batch"]) if summary else UNKNOWN for summary in (comparison.subject, comparison.reference)]
    if comparison.ratio is None:
        return (label(comparison.subject.cell, fields), *batches, UNKNOWN, comparison.reason or "")
    ratio = f"{comparison.ratio:.2f}x" + ("" if comparison.is_settled else " ~")
    return (label(comparison.subject.cell, fields), *batches, ratio, evidence_of(comparison))
