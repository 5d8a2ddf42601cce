"""Which two cells may be put in one ratio: those that differ in the named axis and in nothing else, requested or observed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.summary import plain

if TYPE_CHECKING:
    from benchbox.analysis.summary import CellSummary

# Launches that differ in any of these were made with something else, and the ratio would be of that too.
_SAME_ENVIRONMENT = (
    "machine",
    "benchbox",
    "policy_sha256",
    "torch",
    "accelerate",
    "deepspeed",
    "driver",
    "cuda",
    "threads",
    "variables",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Throughput of one cell as a multiple of another's, or the reason why that number would mislead."""

    axis: tuple[str, ...]
    subject: CellSummary
    reference: CellSummary | None
    ratio: float | None
    reason: str | None
    apart: bool | None  # whether the ranges over launches do not overlap; None with a single launch on either side


def reference_axis(reference: Mapping[str, Any], axes: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """The fields a matrix's `reference` compares along, and why they are no single axis, if they are not.

    Several fields count as one axis only when the matrix moves them together (a zipped axis).
    """
    fields = tuple(reference)
    if len(fields) <= 1:
        return fields, None
    zipped = (set(values[0]) for values in axes.values() if values and isinstance(values[0], Mapping))
    if any(set(fields) <= keys for keys in zipped):
        return fields, None
    return fields, f"the reference differs in {len(fields)} axes at once: {', '.join(fields)}"


def against_reference(
    summaries: Sequence[CellSummary], reference: Mapping[str, Any], axes: Mapping[str, Any]
) -> dict[str, Comparison]:
    """Every cell that is not itself a reference, by cell id, against the cell that equals it but for the reference's axis."""
    if not reference:
        return {}
    fields, trouble = reference_axis(reference, axes)
    found = {}
    for summary in summaries:
        if all(summary.cell.get(field) == value for field, value in reference.items()):
            continue
        wanted = {**summary.cell, **reference}
        other = next((candidate for candidate in summaries if candidate.cell == wanted), None)
        found[summary.cell_id] = _comparison(summary, other, fields, trouble)
    return found


def _comparison(subject: CellSummary, reference: CellSummary | None, axis: tuple[str, ...], trouble: str | None) -> Comparison:
    reason = trouble
    if reason is None and reference is None:
        reason = f"no cell differs from it in {' and '.join(axis)} only"
    if reason is None and reference is not None:
        reason = incomparable(subject, reference, axis)
    ratio = apart = None
    if reason is None and reference is not None:
        own, other = (summary.values["global_samples_per_s"] for summary in (subject, reference))
        assert own is not None
        assert other is not None
        ratio = own.value / other.value
        if min(own.launches, other.launches) > 1:
            apart = own.low > other.high or own.high < other.low
    return Comparison(axis=axis, subject=subject, reference=reference, ratio=ratio, reason=reason, apart=apart)


def incomparable(one: CellSummary, other: CellSummary, axis: Collection[str]) -> str | None:
    """Why two cells may not be put in one ratio along `axis`, or None when they may."""
    differ = [field for field in one.cell if field not in axis and one.cell[field] != other.cell.get(field)]
    if differ:
        return f"they also differ in {', '.join(differ)}"
    for summary in (one, other):
        if summary.status != "ok":
            return f"{_name(summary, axis)} is {summary.status}"
    first, second = one.evidence, other.evidence
    assert first is not None
    assert second is not None
    for name, values in _must_agree(first, second, axis).items():
        if values[0] != values[1]:
            return f"they also differ in {name}: {plain(values[0])} against {plain(values[1])}"
    return None


def _must_agree(one: Mapping[str, Any], other: Mapping[str, Any], axis: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """What was seen and must be the same on both sides, whatever was asked for."""
    both = (one, other)

    def values(read: Any) -> tuple[Any, Any]:
        return read(both[0]), read(both[1])

    pairs = {"measured steps": values(lambda record: record["steps"])}
    if "attention" not in axis:
        pairs["the attention kernel that ran"] = values(lambda record: record["observed"]["attention_kernel"])
    if "checkpointing" not in axis:
        pairs["checkpointed modules"] = values(lambda record: bool(record["observed"]["checkpointed_modules"]))
    if "recipe" not in axis:
        pairs["Adam state"] = values(lambda record: ", ".join(adam_dtypes(record)) or None)
    for key in _SAME_ENVIRONMENT:
        pairs[key] = values(lambda record, key=key: (record["environment"] or {}).get(key))
    return pairs


def adam_dtypes(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Dtypes of Adam's moments found on any rank, `float32`, sorted; empty when no census was taken."""
    census = (record["precision"] or {}).get("census") or []
    return tuple(sorted({entry["dtype"].removeprefix("torch.") for entry in census if entry["kind"].startswith("exp_avg")}))


def _name(summary: CellSummary, axis: Collection[str]) -> str:
    return " ".join(plain(summary.cell.get(field)) for field in axis)
