"""The profile of a cell as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.report.peak_share import doubts_on_peaks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.profile import Communication, Profile

OPERATORS = 15


def render_profile(profile: Profile) -> str:
    """Return the tables of a profile by phase, tower and operation, and what they mean."""
    return "\n".join(_lines(profile)) + "\n"


def _lines(profile: Profile) -> Iterator[str]:
    yield f"rank {profile['rank']}, the slowest: a step takes {quantity(profile['step_s'], 's')} on {profile['machine']}"
    yield ""
    yield from _aligned(_phase_rows(profile))
    for phase, reason in profile["fused_phases"].items():
        yield f"{phase}: {reason}"
    for reason in dict.fromkeys(
        f"{row['phase']}: {reason}"
        for row in profile["phases"]
        for reason in (row["flops_reason"], row["bytes_reason"])
        if reason not in (None, "no products", profile["peaks_reason"])
    ):
        yield reason
    if profile["summary"]:
        yield profile["summary"]
    if profile["communication"]:
        yield _communication(profile["communication"])
    if peaks := profile["peaks"]:
        for doubt in doubts_on_peaks(peaks["uncertainty"], peaks["torch"], profile["ranks"][profile["rank"]]["torch"]):
            yield f"warning: {doubt}"
    if profile["busy_host"]:
        yield f"warning: busy host while steps were timed: {'; '.join(profile['busy_host'])}: times are too long"
    for doubt in profile["compilation_doubts"]:
        yield f"warning: {doubt}"
    if profile["peaks_reason"]:
        yield f"shares of the peaks are unknown: {profile['peaks_reason']}"
    yield ""
    yield from _aligned(
        [
            ("tower", "phase", "time", "of phase", "FLOPs", "FLOP/s", "of peak"),
            *(
                (
                    row["tower"],
                    row["phase"],
                    quantity(row["seconds"], "s"),
                    f"{row['share']:.1%}",
                    quantity(row["flops"], "FLOP") if row["flops"] else UNKNOWN,
                    f"{quantity(row['flops'] / row['seconds'], 'FLOP')}/s" if row["flops"] and row["seconds"] else UNKNOWN,
                    _share(row["of_peak"]),
                )
                for row in profile["towers"]
            ),
        ],
        texts=2,
    )
    if profile["towers_reason"]:
        yield f"unknown: {profile['towers_reason']}"
    yield ""
    steps = len(profile["ranks"][profile["rank"]]["profiled_step_s"])
    slower = profile["profiled_step_s"] / profile["step_s"]
    yield f"longest operations by self time, in {steps} profiled steps; a profiled step takes {slower:.2f} times as long"
    yield from _aligned(
        [
            ("operation", "calls", "self time", "of steps"),
            *(
                (row["name"], str(row["calls"]), quantity(row["self_s"], "s"), f"{row['self_s'] / profile['profiled_s']:.1%}")
                for row in profile["operators"][:OPERATORS]
            ),
        ]
    )


def _phase_rows(profile: Profile) -> list[tuple[str, ...]]:
    heads = ("phase", "time", "of step", "FLOP/s", "of peak", "of shapes", "bytes/s", "of memory", "nearer to")
    return [
        heads,
        *(
            (
                row["phase"],
                quantity(row["seconds"], "s"),
                f"{row['share']:.1%}",
                f"{quantity(row['flops_per_s'], 'FLOP')}/s" if row["flops"] else UNKNOWN,
                _share(row["of_peak"]),
                _share(row["of_shapes"]),
                f"{quantity(row['bytes_per_s'], 'bytes')}/s" if row["bytes"] else UNKNOWN,
                _share(row["of_memory"]) if row["bytes"] else UNKNOWN,
                row["bound"] or UNKNOWN if row["bytes"] or row["flops"] else UNKNOWN,
            )
            for row in profile["phases"]
        ),
    ]


def _communication(collectives: Communication) -> str:
    text = f"collectives of a step carry {quantity(collectives['bytes'], 'bytes')}"
    if collectives["kernels_s"] is not None:
        text += f", and their kernels run for {quantity(collectives['kernels_s'], 's')}, which no tower has"
    if collectives["seconds"] is None or collectives["share"] is None:
        return text
    rate = quantity(collectives["all_reduce_bytes_per_s"], "bytes")
    return (
        f"{text}: at the {rate}/s that an all-reduce reaches, {quantity(collectives['seconds'], 's')} or "
        f"{collectives['share']:.1%} of the step; an all-gather or a reduce-scatter takes half as long"
    )


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def _aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> Iterator[str]:
    """Yield the rows as lines of columns; the first `texts` columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            text.ljust(width) if column < texts else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
