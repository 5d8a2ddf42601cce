"""The texts that all formats of a comparison share."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchbox.analysis.inference import ALPHA
from benchbox.analysis.noise import MIN_NOISE_RUNS, describe_span
from benchbox.analysis.quantities import UNKNOWN, quantity

if TYPE_CHECKING:
    from benchbox.analysis.changes import Change, RunComparison
    from benchbox.analysis.trends import ChangePoint

COLUMNS = ("cell", "metric", "base", "head", "head / base", "verdict")
NUMBERS = ("base", "head", "head / base")
NO_DIFFERENCES = "The two sides differ in nothing of their environment that both have recorded and that must be equal."


def row_texts(change: Change) -> tuple[str, ...]:
    """Return a change as texts, one for each of `COLUMNS`."""
    return (
        change.cell,
        change.metric,
        _value_text(change.base, change.unit),
        _value_text(change.head, change.unit),
        ratio_text(change),
        change.verdict,
    )


def ratio_text(change: Change | ChangePoint) -> str:
    """Return the ratio with its interval: `0.947x (0.921x to 0.972x)`."""
    if change.ratio is None:
        return UNKNOWN
    interval = "" if change.low is None or change.high is None else f" ({change.low:.3f}x to {change.high:.3f}x)"
    return f"{change.ratio:.3f}x{interval}"


def sentence(change: Change) -> str:
    """Return a change in one sentence that stands alone."""
    _, _, base, head, ratio, verdict = row_texts(change)
    because = f": {change.reason}" if change.reason else ""
    by = "" if change.ratio is None else f", {ratio}"
    return f"{change.cell}: {change.metric} {base} -> {head}{by}: {verdict}{because}"


def summary_sentences(comparison: RunComparison) -> list[str]:
    """Return the answer in one sentence, and what else differs in a second one."""
    counts = comparison.counts
    if not comparison.changes:
        return [f"{comparison.base} and {comparison.head} have no figures to compare."]
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    worse = counts.get("regression", 0)
    judged = sum(counts.get(verdict, 0) for verdict in ("regression", "improvement", "neutral"))
    answer = f"{worse} of {judged} settled figures are worse" if worse else f"none of {judged} settled figures is worse"
    if not judged:
        answer = "no figure is settled"
    sentences = [f"{comparison.head} against {comparison.base}: {answer} ({numbers})."]
    if comparison.differences:
        sentences.append(f"The runs also differ in {'; '.join(comparison.differences)}.")
    return sentences


def reasons(comparison: RunComparison) -> list[str]:
    """Return each reason of a verdict once, with the number of figures that it is of."""
    numbers = Counter(change.reason for change in comparison.changes if change.reason)
    return [reason if number == 1 else f"{reason} ({number} figures)" for reason, number in numbers.items()]


def method_sentence(comparison: RunComparison) -> str:
    """Return how verdicts were reached."""
    return comparison.method or (
        f"A change of at most {100 * comparison.relevant:.3g}% is none. Throughput and times are compared launch against "
        f"launch, by an exact permutation test at {ALPHA:.0%} over all of them (Holm), which needs {comparison.needed} "
        f"launches on each side; peaks, losses and precision by value. {_drift_sentence(comparison)}"
    )


def _drift_sentence(comparison: RunComparison) -> str:
    noise = comparison.noise
    if noise is not None and len(noise.runs) >= MIN_NOISE_RUNS:
        return (
            "The runs were measured at different times; what this machine drifts by between runs is in its noise floor, from "
            f"{len(noise.runs)} runs of `benchbox noise` within {describe_span(noise.runs)} ({noise.cell})."
        )
    return (
        "The runs were measured at different times, and no launch shows how far the machine drifted between them: "
        f"{MIN_NOISE_RUNS} runs of `benchbox noise` would."
    )


def _value_text(value: float | str | None, unit: str) -> str:
    return value if isinstance(value, str) else quantity(value, unit, digits=4)
