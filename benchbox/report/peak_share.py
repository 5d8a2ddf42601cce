"""Sentences on the shares of the measured peaks that forward, backward and the optimizer of a cell reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.peak_shares import BACKWARD, TOGETHER, peak_shares
from benchbox.analysis.quantities import quantity
from benchbox.analysis.roofline import describe_shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchbox.analysis.peak_shares import PeakShares, Share
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.store.peaks import MeasuredPeaks


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
    for name, share in (*shares.products.items(), ("the optimizer", shares.optimizer)):
        if share.reason:
            reasons.setdefault(share.reason, []).append(name)
    for reason, names in reasons.items():
        is_all = len(names) > len(shares.products)
        yield f"unknown: {reason}" if is_all else f"the share of {' and '.join(names)} is unknown: {reason}"
    if shares.undivided and shares.products[TOGETHER].of_peak is not None:
        yield f"the FLOPs of forward and backward are not known apart: {shares.undivided}"
    if shares.peaks is not None:
        yield from doubts_on_peaks(shares.peaks.uncertainty([shares.dtype]), shares.peaks.torch, shares.torch)


def doubts_on_peaks(uncertainty: str | None, torch_of_peaks: str, torch_of_steps: str | None) -> Iterator[str]:
    """Say why peaks deserve less trust: their repetitions differ, or steps ran under another torch."""
    if uncertainty:
        remedy = "run benchbox doctor --peaks again when nothing else runs on this machine"
        yield f"the peaks are uncertain: {uncertainty}; {remedy}"
    if torch_of_steps not in (None, torch_of_peaks):
        yield (
            f"the peaks are those of torch {torch_of_peaks}, and the steps of torch {torch_of_steps}: "
            "benchbox doctor --peaks measures them again"
        )


def _sentence(shares: PeakShares) -> str:
    """Say at what share of the peaks the phases run whose share is known; nothing where none is."""
    if shares.peaks is None:
        return ""
    best, memory = shares.peaks.best_matmul(shares.dtype), shares.peaks.best_memory
    sentence = describe_shares(
        {
            _subject(name, shares): _reached(share, "FLOP")
            for name, share in shares.products.items()
            if share.of_peak is not None
        },
        None if shares.optimizer.of_peak is None else _reached(shares.optimizer, "bytes"),
        f" ({quantity(best['per_s'], 'FLOP')}/s in {shares.dtype})" if best else "",
        f" ({quantity(memory['per_s'], 'bytes')}/s)",
    )
    return f"on each rank, {sentence}" if sentence and shares.peaks.ranks > 1 else sentence


def _subject(name: str, shares: PeakShares) -> str:
    return f"{name}, recomputation included," if shares.recomputes and name in (BACKWARD, TOGETHER) else name


def _reached(share: Share, unit: str) -> str:
    return f"{share.of_peak:.0%} ({quantity(share.per_s, unit)}/s)"
