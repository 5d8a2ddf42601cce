"""Findings of the audit: a rule that fired, with its evidence and the repair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.observer.facts import SourceLocation

# "unknown" is not a mild warning: the rule could not be judged, so the set-up has not passed it.
Severity = Literal["error", "warning", "info", "unknown"]
FAILING: frozenset[str] = frozenset({"error", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that fired. `rank` is the lowest affected rank; `evidence` holds plain JSON values, with all affected `ranks`.

    `cause` is the code of another finding at the same place, of which this one is a consequence. `locations` are lines of the
    training's code that led to it, the nearest to the cause first.
    """

    code: str
    severity: Severity
    title: str
    where: str
    rank: int
    evidence: Mapping[str, Any]
    repair: str
    cause: str | None = None
    locations: tuple[SourceLocation, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
