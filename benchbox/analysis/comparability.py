"""Throughput ratios of cells. Only cells that differ in the named axis and in nothing else, requested or observed, get one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.summary import matrix_text

if TYPE_CHECKING:
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord

# If launches differ in any of these, a ratio would measure that difference too.
_SAME_ENVIRONMENT = (
    "machine",
    "launcher",
    "benchbox",
    "benchbox_sha256",
    "policy_sha256",
    "torch",
    "accelerate",
    "deepspeed",
    "driver",
    "cuda",
    "threads",
    "variables",
)

# The same, but older records lack them, and what is unknown on one side is no difference.
_ADDED_ENVIRONMENT = ("numerics",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Throughput of one cell as a multiple of another's, or the reason why that number would mislead."""

    axis: tuple[str, ...]
    subject: CellSummary
    reference: CellSummary | None
    ratio: float | None
    reason: str | None
    ranges_disjoint: bool | None  # over launches; None with a single launch on either side


def reference_axis(reference: Mapping[str, Any], axes: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Return the fields that a matrix's `reference` compares along, and why they are not a single axis, if they are not.

    Several fields count as one axis only when the matrix moves them together (a zipped axis).
    """
    fields = tuple(reference)
    if len(fields) <= 1:
        return fields, None
    zipped = (set(values[0]) for values in axes.values() if values and isinstance(values[0], Mapping))
    if any(set(fields) <= keys for keys in zipped):
        return fields, None
    return fields, f"the reference differs in {len(fields)} axes at once: {', '.join(fields)}"


def compare_with_reference(
    summaries: Sequence[CellSummary], reference: Mapping[str, Any], axes: Mapping[str, Any]
) -> dict[str, Comparison]:
    """Compare every cell that is not itself a reference with the cell that equals it except on the reference's axis.

    Returns:
        Comparisons by cell id.
    """
    if not reference:
        return {}
    fields, obstacle = reference_axis(reference, axes)
    comparisons = {}
    for summary in summaries:
        if all(summary.cell.get(field) == value for field, value in reference.items()):
            continue
        reference_cell = {**summary.cell, **reference}
        counterpart = next((candidate for candidate in summaries if candidate.cell == reference_cell), None)
        comparisons[summary.cell_id] = _comparison(summary, counterpart, fields, obstacle)
    return comparisons


def _comparison(subject: CellSummary, reference: CellSummary | None, axis: tuple[str, ...], obstacle: str | None) -> Comparison:
    reason = obstacle
    if reason is None and reference is None:
        reason = f"no cell differs from it in {' and '.join(axis)} only"
    if reason is None and reference is not None:
        reason = why_incomparable(subject, reference, axis)
    ratio = disjoint = None
    if reason is None and reference is not None:
        numerator, denominator = (summary.values["global_samples_per_s"] for summary in (subject, reference))
        assert numerator is not None
        assert denominator is not None
        ratio = numerator.value / denominator.value
        if min(numerator.launches, denominator.launches) > 1:
            disjoint = numerator.low > denominator.high or numerator.high < denominator.low
    return Comparison(axis=axis, subject=subject, reference=reference, ratio=ratio, reason=reason, ranges_disjoint=disjoint)


def why_incomparable(subject: CellSummary, reference: CellSummary, axis: Collection[str]) -> str | None:
    """Return the reason why a ratio of two cells along `axis` would mislead, or None when they are comparable."""
    different = [field for field in subject.cell if field not in axis and subject.cell[field] != reference.cell.get(field)]
    if different:
        return f"they also differ in {', '.join(different)}"
    for summary in (subject, reference):
        if summary.status != "ok":
            return f"{_name(summary, axis)} is {summary.status}"
    assert subject.evidence is not None
    assert reference.evidence is not None
    for name, read in _controlled_values(axis).items():
        subject_value, reference_value = read(subject.evidence), read(reference.evidence)
        if name in _ADDED_ENVIRONMENT and None in (subject_value, reference_value):
            continue
        if subject_value != reference_value:
            return f"they also differ in {name}: {matrix_text(subject_value)} against {matrix_text(reference_value)}"
    return None


def _controlled_values(axis: Collection[str]) -> dict[str, Callable[[LaunchRecord], Any]]:
    """Return readers of the observed values, by name, that must be equal on both sides whatever was requested."""
    readers: dict[str, Callable[[LaunchRecord], Any]] = {"measured steps": lambda record: record["steps"]}
    if "attention" not in axis:
        readers["the attention kernel that ran"] = _attention_kernel
    if "checkpointing" not in axis:
        readers["checkpointed modules"] = _is_checkpointed
    if "recipe" not in axis:
        readers["Adam state"] = lambda record: ", ".join(adam_dtypes(record)) or None
    for key in (*_SAME_ENVIRONMENT, *_ADDED_ENVIRONMENT):
        readers[key] = _environment_reader(key)
    return readers


def _environment_reader(key: str) -> Callable[[LaunchRecord], Any]:
    def read(record: LaunchRecord) -> Any:
        value = (record["environment"] or {}).get(key)
        # A variable that is null is not set, as one that an older record does not list.
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, Mapping) else value

    return read


def _attention_kernel(record: LaunchRecord) -> str | None:
    return record["observed"]["attention_kernel"] if record["observed"] else None


def _is_checkpointed(record: LaunchRecord) -> bool:
    return bool(record["observed"] and record["observed"]["checkpointed_modules"])


def adam_dtypes(record: LaunchRecord) -> tuple[str, ...]:
    """Return the dtypes of Adam's moments on all ranks, such as `float32`, sorted; empty when no census was taken."""
    census = record["precision"]["census"] if record["precision"] else []
    return tuple(sorted({entry["dtype"].removeprefix("torch.") for entry in census if entry["kind"].startswith("exp_avg")}))


def _name(summary: CellSummary, axis: Collection[str]) -> str:
    return " ".join(matrix_text(summary.cell.get(field)) for field in axis)
