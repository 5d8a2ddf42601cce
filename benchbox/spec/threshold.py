"""Thresholds that `benchbox check` compares the records of a run with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

FASTEST = "fastest"  # in place of a batch: of every walk the one that is fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A breach that is accepted for a while. `until` is the last day, as ISO 8601 writes it."""

    reason: str
    until: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One demand on one metric, in every cell that `where` selects (all of them when it is empty).

    With the batch `FASTEST`, `where` selects walks, and the demand is on the fastest batch of each.

    At least one of `expect`, `min`, `max`, `max_regression` is set. `max_regression` is a fraction (0.05 for 5%) of the
    baseline's value, in the metric's worse direction. With the severity `warning` a breach is printed and fails nothing.
    """

    metric: str
    where: Mapping[str, Any] = field(default_factory=dict)
    expect: str | float | None = None
    min: float | None = None
    max: float | None = None
    max_regression: float | None = None
    severity: Literal["error", "warning"] = "error"
    accept: Acceptance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without demands that are absent; the keys are those of a matrix."""
        values: dict[str, Any] = {name: getattr(self, name) for name in ("expect", "min", "max", "max_regression")}
        values["severity"] = None if self.severity == "error" else self.severity
        values["accept"] = asdict(self.accept) if self.accept else None
        return {"metric": self.metric, "where": dict(self.where)} | {k: v for k, v in values.items() if v is not None}
