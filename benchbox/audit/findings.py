"""A finding: a rule that fired, with its evidence and the repair."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# "unknown" is not a mild warning: the rule could not be judged, so the set-up has not passed it.
Severity = Literal["error", "warning", "info", "unknown"]
FAILING: frozenset[str] = frozenset({"error", "unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`rank` is the lowest rank that shows it; `evidence` holds plain JSON values, among them all such `ranks`."""

    code: str
    severity: Severity
    title: str
    where: str
    rank: int
    evidence: Mapping[str, Any]
    repair: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def failing(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of findings, as a record holds them, those that keep an audit from passing."""
    return [finding for finding in findings if finding["severity"] in FAILING]


def finding_lines(finding: Mapping[str, Any]) -> list[str]:
    """A finding, as a record holds it, in plain text lines."""
    lines = [f"{finding['code']} {finding['severity']}: {finding['title']}", f"  where     {finding['where']}"]
    for key, value in finding["evidence"].items():
        if value is not None:
            shown = ", ".join(str(item) for item in value) if isinstance(value, list) else value
            lines.append(f"  {key:<9} {shown}")
    lines.append(f"  repair    {finding['repair']}")
    return lines
