"""The thresholds of a matrix, or of a file of their own, as they are written."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, WrapValidator, model_validator

from benchbox.errors import ConfigurationError
from benchbox.registry.metrics import metrics
from benchbox.registry.policies import PolicyEntry, find_policies
from benchbox.spec.fields import Point
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.source import read_source
from benchbox.spec.threshold import FASTEST, Acceptance, Threshold
from benchbox.spec.types import ABSENT, Batch, Fraction, MetricName, Strict, check_name, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchbox.registry.launch_record import CellDict


def _day(value: Any) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        raise refusal(f"{value!r} is no day", 'write it as "2026-12-31"') from None


class AcceptanceFile(Strict):
    """A breach that is known and accepted for a while."""

    reason: Annotated[str, Field(min_length=1)]
    """Why it is accepted."""
    until: Annotated[str, BeforeValidator(_day)]
    """The last day on which it is: "2026-12-31"."""


def _word_or_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refusal("expect must be a word or a number")
    return value


def _fastest_or_batch(value: Any, validate: Callable[[Any], int]) -> Any:
    return value if value == FASTEST else validate(value)


class SelectedCells(Point):
    """Some of the fields of a cell: the cells that a threshold applies to."""

    batch: Annotated[
        Batch,
        WrapValidator(_fastest_or_batch),
        WithJsonSchema({"anyOf": [{"const": FASTEST}, {"type": "integer", "minimum": 1, "maximum": 1_000_000}]}),
    ] = ABSENT
    """Samples per rank and micro-step; or fastest, which selects the fastest batch of every walk."""


class ThresholdFile(Strict):
    metric: MetricName
    """A metric of `benchbox list metrics`."""
    where: SelectedCells = ABSENT
    """The cells that the threshold applies to; all of them when it is absent."""
    expect: Annotated[str | float, BeforeValidator(_word_or_number)] = ABSENT
    """The metric equals this."""
    min: float = ABSENT
    """The least value that passes."""
    max: float = ABSENT
    """The largest value that passes."""
    vs: Literal["baseline"] = ABSENT
    """The reference of `max_regression`."""
    max_regression: Fraction = ABSENT
    """Allowed regression relative to the baseline, such as 5% or 0.05."""
    severity: Literal["error", "warning"] = "error"
    """Whether a breach fails the check, or is only printed."""
    accept: AcceptanceFile = ABSENT
    """A breach is accepted until a day: the check passes and says so."""

    @model_validator(mode="after")
    def _check_demand(self) -> ThresholdFile:
        metric, keys = metrics()[self.metric], self.model_fields_set
        if not keys & {"expect", "min", "max", "max_regression"}:
            raise refusal(f"demands nothing of {self.metric}", "give expect, min, max, or vs: baseline with max_regression")
        if ("vs" in keys) != ("max_regression" in keys):
            raise refusal("vs and max_regression go together", "vs: baseline, max_regression: 5%")
        if self.where and self.where.explicit_values().get("batch") == FASTEST and not metric.across_batches:
            comparable = ", ".join(sorted(name for name, other in metrics().items() if other.across_batches))
            raise refusal(f"{self.metric} depends on the batch, and another one may be fastest", f"give one of {comparable}")
        if "max_regression" in keys and metric.direction == "none":
            raise refusal(f"{self.metric} has no better direction to regress from", "give expect, min or max")
        if {"min", "max"} <= keys and self.min > self.max:
            raise refusal(f"min {self.min} is above max {self.max}: nothing passes")
        if not metric.is_number and keys & {"min", "max"}:
            raise refusal(f"{self.metric} is a word, not a number", "give expect")
        if "expect" in keys:
            if metric.is_number and isinstance(self.expect, str):
                raise refusal(f"{self.metric} is a number, and {self.expect!r} is not")
            if metric.words:
                check_name(f"{self.metric} to expect", str(self.expect), metric.words)
        return self


class ThresholdsFile(Strict):
    """A file of thresholds, which `benchbox check --thresholds` uses in place of those of the matrix."""

    thresholds: list[ThresholdFile]
    """Demands that `benchbox check` makes."""


def threshold_of(parsed: ThresholdFile) -> Threshold:
    """Return the threshold that a file describes."""
    accept = parsed.accept
    return Threshold(
        metric=parsed.metric,
        where=parsed.where.explicit_values() if parsed.where else {},
        expect=parsed.expect,
        min=parsed.min,
        max=parsed.max,
        max_regression=parsed.max_regression,
        severity=parsed.severity,
        accept=Acceptance(reason=accept.reason, until=accept.until) if accept else None,
    )


def load_thresholds(path: Path, cells: Iterable[CellDict] = ()) -> tuple[Threshold, ...]:
    """Read a file of thresholds: a mapping with the key `thresholds`, as in a matrix.

    Args:
        cells: those of the run, whose policies and sizes may be named too, wherever they were found.

    Raises:
        ConfigurationError: with every problem of the file, each at its line and column.
    """
    source = read_source(path, beginning="thresholds:")
    problems = list(source.problems)
    try:
        parsed = ThresholdsFile.model_validate(source.values, context={"policies": _policies(cells)})
    except ValidationError as error:
        problems += problems_of(error, ThresholdsFile, source, problems)
    if problems:
        raise ConfigurationError(in_order(problems))
    return tuple(map(threshold_of, parsed.thresholds))


def _policies(cells: Iterable[CellDict]) -> dict[str, PolicyEntry]:
    """Return the policies that are found here, and those of cells."""
    policies = find_policies()
    for cell in cells:
        policy = policies.get(cell["policy"]) or PolicyEntry(cell["policy"], Path(), {})
        policies[cell["policy"]] = replace(policy, presets={cell["size"]: {}, **policy.presets})
    return policies
