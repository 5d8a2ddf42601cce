"""The answer of a run in three lines: which set-up, is that settled, is its precision right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.answers import SETUP_FIELDS, answers
from benchbox.analysis.inference import ONE_TEST, Criteria
from benchbox.analysis.quantities import counted, quantity
from benchbox.analysis.summary import BUSY_HOST, MISSING, PARTIAL_STEPS, PARTLY_COMPILED, RECOMPILED, label
from benchbox.registry.statuses import DIVERGED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.answers import Answer
    from benchbox.analysis.certificates import Certificate
    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.summary import CellSummary

Level = Literal["ok", "warning", "bad"]

# Marks of the fastest set-up that neither an interval nor the number of launches shows.
_DOUBTS = {
    BUSY_HOST: "It was measured on a busy host.",
    RECOMPILED: "It compiled in measured steps.",
    PARTLY_COMPILED: "A part of it ran uncompiled.",
    PARTIAL_STEPS: "Its measured steps were not whole.",
}


# What became of set-ups without a figure; the other statuses speak for themselves.
_OUTCOMES = {
    "crash": "crashed",
    "oom": "ran out of memory",
    "hang": "hung",
    "timeout": "timed out",
    "mismatch": "ran something else",
    DIVERGED: "trained differently",
    MISSING: "not measured",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLine:
    """One of the three lines, and how good it is."""

    text: str
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBox:
    """The answer for one task: its name where a run has several, and the lines."""

    task: str
    lines: tuple[AnswerLine, ...]
    has_run: bool = True  # whether any launch of its set-ups was made


def answer_boxes(
    summaries: Sequence[CellSummary],
    axes: Sequence[str],
    *,
    memory_limit: int | None = None,
    criteria: Criteria = ONE_TEST,
    walks: Sequence[Certificate] = (),
    compared: Sequence[Comparison] = (),
) -> tuple[AnswerBox, ...]:
    """Return the boxes of a run; none where no task has two set-ups. `axes` are the fields that vary."""
    results = answers(summaries, memory_limit=memory_limit, criteria=criteria, walks=walks, compared=compared)
    setup_axes = [axis for axis in axes if axis in SETUP_FIELDS]
    task_axes = [axis for axis in axes if axis not in SETUP_FIELDS]
    if not setup_axes:
        return ()
    return tuple(
        AnswerBox(
            task=label(answer.task, task_axes) if task_axes else "",
            lines=_lines(answer, setup_axes, memory_limit, criteria),
            has_run=bool(answer.fastest or answer.too_large or answer.unknown_memory or answer.wrong)
            or set(answer.failed) != {MISSING},
        )
        for answer in results
    )


def _lines(answer: Answer, axes: Sequence[str], memory_limit: int | None, criteria: Criteria) -> tuple[AnswerLine, ...]:
    limit = "" if memory_limit is None else f" in {quantity(memory_limit, 'bytes')}"
    if answer.fastest is None:
        reason = "no set-up ended ok" if set(answer.failed) != {MISSING} else "no set-up was measured"
        if answer.unknown_memory:
            reason = f"the memory of {counted(answer.unknown_memory, 'set-up')} is unknown"
        if answer.too_large:
            unknown = f"; {reason}" if answer.unknown_memory else ""
            reason = f"none of {answer.too_large} set-ups fits" if answer.too_large > 1 else "1 set-up does not fit"
            reason += f"{limit}{unknown}"
        if answer.wrong:
            reason = "the precision of every set-up that fits is wrong"
        return (AnswerLine(text=f"No answer: {reason}.", level="bad"),)
    return (
        AnswerLine(text=_fastest_text(answer, answer.fastest, axes, limit), level="ok"),
        _with_doubts(_settled_line(answer, axes, 100 * criteria.relevant), answer.fastest),
        _precision_line(answer, answer.fastest, axes),
    )


def _fastest_text(answer: Answer, fastest: CellSummary, axes: Sequence[str], limit: str) -> str:
    speed = fastest.values["global_samples_per_s"]
    assert speed is not None
    peak = fastest.peak_bytes
    memory = "" if peak is None else f", {quantity(peak, 'bytes')} at its peak on a rank"
    total = answer.candidates + sum(answer.failed.values())
    if answer.candidates > 1:
        among = f"Fastest of {answer.candidates}{f' of {total}' if answer.failed else ''} set-ups{limit}"
    else:
        among = _only_setup(answer, total, limit)
    left = f"; {_need(answer.too_large)} more" if answer.too_large else ""
    left += f"; {_outcomes(answer.failed)}" if answer.failed else ""
    left += f"; what {_need(answer.unknown_memory)} is unknown" if answer.unknown_memory else ""
    left += f"; the precision of {counted(answer.slower_wrong, 'slower one')} is wrong" if answer.slower_wrong else ""
    name = label(fastest.cell, axes)
    return f"{among}: {name}, {quantity(speed.value, 'samples/s')}{memory}{left}."


def _only_setup(answer: Answer, total: int, limit: str) -> str:
    """Return in what the only candidate differs from the other set-ups of its task, of `total` that ran or should have."""
    is_left_out = {
        f"fits{limit}": answer.too_large or answer.unknown_memory,
        "has no error of precision": answer.wrong or answer.slower_wrong,
    }
    reasons = [reason for reason, count in is_left_out.items() if count]
    if not reasons:
        return f"The only set-up{f' of {total} that ended ok' if answer.failed else ''}{limit}"
    return f"The only set-up that {' and '.join(['ended ok'] * bool(answer.failed) + reasons)}"


def _need(number: int) -> str:
    return f"{number} needs" if number == 1 else f"{number} need"


def _outcomes(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {_OUTCOMES.get(status, status)}" for status, count in failed.items())


def _settled_line(answer: Answer, axes: Sequence[str], relevant: float) -> AnswerLine:
    if answer.candidates == 1:
        return AnswerLine(text="Nothing to compare it with.", level="warning")
    assert answer.fastest is not None
    least, most = answer.launches
    launches = f"{least}" if least == most else f"at least {least}"
    open_rivals = [rival for rival in answer.rivals if not rival.is_equal]
    if not open_rivals:
        equal = ", ".join(label(rival.summary.cell, axes) for rival in answer.rivals)
        text = f"{launches} launches of each show every other one to be slower"
        if equal:
            text = f"{launches} launches of each show nothing to be faster, and {equal} to differ by less than {relevant:.3g}%"
        if answer.unknown_speed:
            return AnswerLine(text=f"Not settled against {_outcomes(answer.unknown_speed)}; {text}.", level="warning")
        return AnswerLine(text=f"Settled: {text}.", level="ok")
    nearest = open_rivals[0]
    name = label(nearest.summary.cell, axes)
    others = f" and {len(open_rivals) - 1} more" if len(open_rivals) > 1 else ""
    if nearest.effect is None:
        text = f"Not comparable with {name}{others}: {nearest.reason}."
    elif answer.more_launches:
        more = counted(answer.more_launches, "more launch", "more launches")
        text = f"Not settled against {name}{others}: {more} of each could."
    else:
        interval = f"{nearest.effect.low:.2f}x to {nearest.effect.high:.2f}x" if nearest.effect.low is not None else "unknown"
        text = f"Not settled against {name}{others}: {nearest.effect.ratio:.2f}x its samples/s, {interval}."
    return AnswerLine(text=text, level="warning")


def _with_doubts(line: AnswerLine, fastest: CellSummary) -> AnswerLine:
    doubts = [_DOUBTS[mark] for mark in fastest.marks if mark in _DOUBTS]
    return AnswerLine(text=" ".join([line.text, *doubts]), level="warning") if doubts else line


def _precision_line(answer: Answer, fastest: CellSummary, axes: Sequence[str]) -> AnswerLine:
    faster = ""
    if answer.wrong:
        names = ", ".join(label(summary.cell, axes) for summary in answer.wrong[:3])
        more = f" and {len(answer.wrong) - 3} more" if len(answer.wrong) > 3 else ""
        faster = f" Not counted, because their precision is wrong: {names}{more}."
    edq = fastest.values.get("edq")
    arrived = "" if edq is None else f", EDQ {edq.value:.3f}"
    if answer.precision == "right":
        warnings = {finding["code"] for finding in (fastest.precision or {"findings": []})["findings"]}
        noted = f"; noted: {', '.join(sorted(warnings))}" if warnings else ""
        return AnswerLine(text=f"Precision is right: the audit has no error{arrived}{noted}.{faster}", level="ok")
    reason = "it was not audited" if fastest.precision is None else "the audit could not judge it"
    return AnswerLine(text=f"Precision is unknown: {reason}.{faster}", level="warning")
