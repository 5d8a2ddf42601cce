"""Sentences on the shares of the measured peaks that forward, backward and the optimizer of a cell reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.peak_shares import BACKWARD, TOGETHER, peak_shares
from benchbox.analysis.quantities import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchbox.analysis.peak_shares import PeakShares, Share
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.peaks import MeasuredPeaks

_OPTIMIZER = "the optimizer"


def peak_share_lines(
    summary: CellSummary, record: LaunchRecord, measured: Mapping[str, MeasuredPeaks] | str
) -> tuple[str, ...]:
    """Return what a cell reaches of the measured peaks, why a share is unknown, and why the peaks deserve less trust.

    Args:
        summary: of the cell.
        record: a launch of it; of one that did not end ok nothing is said.
        measured: peaks of the machine of the run by group of ranks, or why they are unknown.
    """
    return tuple(_lines(peak_shares(summary, record, measured))) if summary.ok else ()


def _lines(shares: PeakShares) -> Iterator[str]:
    if sentence := _sentence(shares):
        yield sentence
    reasons: dict[str, list[str]] = {}  # reason -> what is unknown for it
    for name, share in (*shares.products.items(), (_OPTIMIZER, shares.optimizer)):
        if share.reason:
            reasons.setdefault(share.reason, []).append(name)
    for reason, names in reasons.items():
        is_all = len(names) > len(shares.products)
        yield f"unknown: {reason}" if is_all else f"the share of {' and '.join(names)} is unknown: {reason}"
    if shares.undivided and shares.products[TOGETHER].of_peak is not None:
        yield f"the FLOPs of forward and backward are not known apart: {shares.undivided}"
    if shares.peaks is None:
        return
    if uncertain := shares.peaks.uncertainty([shares.dtype]):
        yield f"the peaks are uncertain: {uncertain}; run benchbox doctor --peaks again when nothing else runs on this machine"
    if shares.torch not in (None, shares.peaks.torch):
        yield (
            f"the peaks are those of torch {shares.peaks.torch}, and the steps of torch {shares.torch}: "
            "benchbox doctor --peaks measures them again"
        )


def _sentence(shares: PeakShares) -> str:
    """Say at what share of the peaks the phases run whose share is known; nothing where none is."""
    if shares.peaks is None:
        return ""
    parts = []
    known = {name: share for name, share in shares.products.items() if share.of_peak is not None}
    if known and (best := shares.peaks.best_matmul(shares.dtype)):
        texts = [
            _reached(_subject(name, shares), share, "FLOP", first=name == next(iter(known))) for name, share in known.items()
        ]
        peak = f"{quantity(best['per_s'], 'FLOP')}/s in {shares.dtype}"
        parts.append(f"{' and '.join(texts)} of what this device can do in products ({peak})")
    if shares.optimizer.of_peak is not None:
        peak = f"{quantity(shares.peaks.best_memory['per_s'], 'bytes')}/s"
        text = _reached(_OPTIMIZER, shares.optimizer, "bytes", first=not parts)
        parts.append(f"{text} of what its memory can do ({peak})")
    where = "on each rank, " if shares.peaks.ranks > 1 else ""
    return where + ", ".join(parts) if parts else ""


def _subject(name: str, shares: PeakShares) -> str:
    return f"{name}, recomputation included," if shares.recomputes and name in (BACKWARD, TOGETHER) else name


def _reached(subject: str, share: Share, unit: str, *, first: bool) -> str:
    """Return the share of a phase in words: with a verb for the first of a sentence."""
    verb = "" if not first else "run " if subject.startswith(TOGETHER) else "runs "
    return f"{subject} {verb}at {share.of_peak:.0%} ({quantity(share.per_s, unit)}/s)"
