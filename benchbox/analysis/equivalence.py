"""Comparison of cells that ask for the same training: loss and gradient norm by step, relative to a reference cell.

Backend, ranks, micro-batches, attention kernel, checkpointing, compilation and padding change the order of sums and nothing
else. Cells that differ only in these form a group. What rounding may change is the tolerance of their recipe
(`benchbox.registry.recipes`); a cell beyond it is `diverged`: its gradients are wrong, or its losses are not those of the same
samples.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.adam_state import adam_dtypes
from benchbox.analysis.quantities import quantity
from benchbox.registry.launch_record import device_type
from benchbox.registry.recipes import JUDGED_STEPS, TF32_TOLERANCE, Recipe, Tolerance, recipes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import CellDict, LaunchRecord

Quantity = Literal["loss", "grad_norm"]
EquivalenceVerdict = Literal["reference", "equivalent", "diverged", "not compared"]
QUANTITIES: tuple[Quantity, ...] = ("loss", "grad_norm")
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}

# They change how a training is computed, not which one it is. Their product, the global batch, is compared instead.
_SPLIT = ("batch", "accumulation", "world_size")
_FREE = (*_SPLIT, "backend", "shard_size", "attention", "checkpointing", "compile", "padding")

# Values near zero differ by large factors that mean nothing: differences are relative to at least this part of the largest.
_SMALLEST_SCALE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Relative differences of one quantity from the reference by step, None where both have no number.

    `step`, from 0, has the largest difference in units of its tolerance; None when no step could be judged.
    """

    quantity: Quantity
    values: tuple[float | None, ...]
    tolerances: tuple[float, ...]  # of the steps that are judged, which are the first ones
    step: int | None

    @property
    def largest(self) -> float | None:
        """The difference at `step`."""
        return None if self.step is None else self.values[self.step]

    @property
    def tolerance(self) -> float | None:
        """The tolerance at `step`."""
        return None if self.step is None else self.tolerances[self.step]

    @property
    def is_within(self) -> bool:
        return self.largest is None or self.tolerance is None or self.largest <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Verdict on one cell beside the reference of its group. `reason` says why it is diverged or not compared."""

    verdict: EquivalenceVerdict
    reference: CellSummary | None = None
    differences: Mapping[Quantity, Difference] | None = None  # of the launch that differs most; None where nothing is compared
    reason: str | None = None


def judge_equivalence(summaries: Sequence[CellSummary], reference: Mapping[str, Any]) -> dict[str, Equivalence]:
    """Return the equivalence of every cell by its id.

    The reference of a group is its first cell with the values of the matrix's `reference`, else its first cell, among those
    with a launch that ended ok. Further launches of the reference are compared with its first one.
    """
    groups: dict[str, list[CellSummary]] = {}
    for summary in summaries:
        groups.setdefault(_training(summary.cell), []).append(summary)
    judged = {}
    for group in groups.values():
        candidates = [summary for summary in group if summary.ok]
        preferred = [summary for summary in candidates if reference.items() <= summary.cell.items()]
        base = next(iter([*preferred, *candidates]), None)
        judged.update({summary.cell_id: _judge(summary, base, alone=len(candidates) < 2) for summary in group})
    return judged


def _training(cell: CellDict) -> str:
    """Return a text that is equal for cells that ask for the same training."""
    values = {field: value for field, value in cell.items() if field not in _FREE}
    global_batch = cell["batch"] * cell["accumulation"] * cell["world_size"]
    return json.dumps([global_batch, values], sort_keys=True)


def _judge(summary: CellSummary, base: CellSummary | None, *, alone: bool) -> Equivalence:
    if not summary.ok or base is None:
        return Equivalence(verdict="not compared", reason=f"it is {summary.status}")
    launches = [record for record in summary.ok if record is not base.ok[0]]
    if alone and not launches:
        return Equivalence(verdict="not compared", reason="no other cell of the matrix asks for the same training")
    recipe = recipes().get(summary.cell["recipe"])
    reason = _why_not_compared(launches, base.ok[0], recipe)
    if reason is not None:
        return Equivalence(verdict="not compared", reference=base, reason=reason)
    if not launches:
        return Equivalence(verdict="reference", reference=base)
    if _is_untrained(base.ok[0]):
        reason = "every gradient of the reference is zero, and its own are not"
        return Equivalence(verdict="diverged", reference=base, reason=reason)
    assert recipe is not None
    tolerance = _tolerance(recipe, base.ok[0])
    worst = max((_differences(record, base.ok[0], tolerance) for record in launches), key=_excess)
    reason = _why_diverged(worst)
    if reason is not None:
        return Equivalence(verdict="diverged", reference=base, differences=worst, reason=reason)
    unknown = [name for name in QUANTITIES if not all(record[name] for record in (*launches, base.ok[0]))]
    if unknown:
        reason = f"the {NAMES[unknown[0]]} of a launch is unknown"
        return Equivalence(verdict="not compared", reference=base, reason=reason)
    return Equivalence(verdict="reference" if summary is base else "equivalent", reference=base, differences=worst)


def _why_not_compared(launches: Sequence[LaunchRecord], base: LaunchRecord, recipe: Recipe | None) -> str | None:
    if recipe is None or recipe.tolerance is None:
        return "its recipe declares no tolerance"
    for record in launches:
        for name, value, expected in (
            ("Adam state", ", ".join(adam_dtypes(record)), ", ".join(adam_dtypes(base))),
            ("the sources of the policy", *(_source_sha256(side, "policy_sha256") for side in (record, base))),
            ("the metadata of the data", *(_source_sha256(side, "data_sha256") for side in (record, base))),
        ):
            if value and expected and value != expected:
                return f"it differs in {name}" + (f": {value} against {expected}" if name == "Adam state" else "")
    if _is_untrained(base) and all(map(_is_untrained, launches)):
        return "every gradient of the reference is zero: nothing trains"
    return None


def _is_untrained(record: LaunchRecord) -> bool:
    """Return whether every gradient of a launch is known to be zero."""
    norms = record["grad_norm"]
    return bool(norms) and all(norm == 0 for norm in norms or ())


def _tolerance(recipe: Recipe, base: LaunchRecord) -> Tolerance:
    """Return the tolerance of the recipe; of float32 products on a GPU, that of the format in which it computes them."""
    assert recipe.tolerance is not None
    is_on_gpu = base["observed"] is not None and "cuda" in map(device_type, base["observed"]["device"])
    numerics = (base["environment"] or {}).get("numerics") or {}
    uses_tf32 = any(numerics.get(name) is True for name in ("matmul_tf32", "cudnn_tf32"))
    return TF32_TOLERANCE if recipe.compute == "float32" and is_on_gpu and uses_tf32 else recipe.tolerance


def _source_sha256(record: LaunchRecord, key: str) -> Any:
    return (record["environment"] or {}).get(key)


def _differences(record: LaunchRecord, base: LaunchRecord, tolerance: Tolerance) -> dict[Quantity, Difference]:
    return {name: _difference(name, record[name] or (), base[name] or (), tolerance) for name in QUANTITIES}


def _difference(
    name: Quantity, values: Sequence[float | None], expected: Sequence[float | None], tolerance: Tolerance
) -> Difference:
    smallest = _SMALLEST_SCALE * max((abs(value) for value in expected if value is not None), default=0.0)
    relative = tuple(relative_difference(*pair, smallest) for pair in zip(values, expected, strict=False))
    tolerances = tuple(tolerance.at(name, step) for step in range(min(len(relative), JUDGED_STEPS)))
    excesses = {step: value / tolerances[step] for step, value in enumerate(relative[:JUDGED_STEPS]) if value is not None}
    step = max(excesses, key=lambda step: excesses[step], default=None)
    return Difference(quantity=name, values=relative, tolerances=tolerances, step=step)


def relative_difference(value: float | None, expected: float | None, smallest: float) -> float | None:
    """Return |value - expected| / max(|expected|, smallest); infinite where only one of them is a number."""
    if value is None or expected is None:
        return None if value is expected else math.inf
    if value == expected:
        return 0.0
    scale = max(abs(expected), smallest)
    return abs(value - expected) / scale if scale else math.inf


def _excess(differences: Mapping[Quantity, Difference]) -> float:
    """Return the largest difference in units of its tolerance."""
    pairs = [(difference.largest, difference.tolerance) for difference in differences.values()]
    return max((largest / tolerance for largest, tolerance in pairs if largest is not None and tolerance), default=0.0)


def _why_diverged(differences: Mapping[Quantity, Difference]) -> str | None:
    texts = [_divergence(difference) for difference in differences.values() if not difference.is_within]
    return "; ".join(texts) or None


def _divergence(difference: Difference) -> str:
    name, step = NAMES[difference.quantity], difference.step
    if difference.largest == math.inf:
        return f"its {name} or the reference's is not a number in step {step}"
    share, explained = quantity(difference.largest, "fraction", 2), quantity(difference.tolerance, "fraction")
    return f"its {name} differs by {share} of the reference's in step {step}, and rounding explains {explained}"
