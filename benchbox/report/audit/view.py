"""What every format of an audit shows, in the order in which it shows it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.audit.findings import Finding
    from benchbox.audit.judge import Judgement, AppliedSuppression
    from benchbox.observer.facts import RankFacts

_ORDER = ("error", "unknown", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A subject, what was seen of it on every rank, and what was found. `title` is for people, `told` for programs."""

    title: str
    told: Mapping[str, Any]
    facts: Sequence[RankFacts]
    judgement: Judgement

    @property
    def chain(self) -> str:
        """The optimizers of the first rank that has any, outermost first."""
        return next((" > ".join(each.optimizer_chain) for each in self.facts if each.optimizer_chain), "")

    @property
    def problems(self) -> list[tuple[int, str]]:
        """(rank, what its witness failed at)."""
        return [(each.rank, problem) for each in self.facts for problem in each.problems]


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """By severity, then by code."""
    return sorted(findings, key=lambda finding: (_ORDER.index(finding.severity), finding.code))


def group_by_reason(not_judged: Mapping[str, str]) -> dict[str, list[str]]:
    """Codes that were not judged, by the reason they share."""
    found: dict[str, list[str]] = {}
    for code, reason in not_judged.items():
        found.setdefault(reason, []).append(code)
    return found


def format_ranks(ranks: Iterable[int]) -> str:
    """`0-3` for neighbours, `0, 2` otherwise."""
    held = sorted(set(ranks))
    if len(held) > 1 and held[-1] - held[0] + 1 == len(held):
        return f"{held[0]}-{held[-1]}"
    return ", ".join(map(str, held))


def escape_unprintable(text: str) -> str:
    """Text from outside, with what is not printable written as an escape: names may hold anything."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def format_value(value: Any) -> str:
    """A value of a finding's evidence, as people read it."""
    if isinstance(value, list):
        texts = [format_value(each) for each in value]
        return ("; " if any("," in text and " " in text for text in texts) else ", ").join(texts)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else escape_unprintable(str(value))


def evidence_rows(finding: Finding) -> list[tuple[str, str]]:
    """(what, value) of a finding's evidence, without what is unknown."""
    more = finding.evidence.get("more")
    rows = []
    for key, value in finding.evidence.items():
        if value is None or key == "more":
            continue
        text = format_ranks(value) if key == "ranks" else format_value(value)
        rows.append((key, append_count(text, more) if key == "names" else text))
    return rows


def append_count(names: str, more: int | None) -> str:
    """Names, and how many more there are."""
    return f"{names} and {more} more" if more else names


def message(finding: Finding) -> str:
    """A finding in one line, for formats that have one."""
    told = "; ".join(f"{key}: {text}" for key, text in [("where", escape_unprintable(finding.where)), *evidence_rows(finding)])
    return f"{escape_unprintable(finding.title)} ({told})"


def format_suppression(suppressed: AppliedSuppression) -> str:
    """What a rule was told not to speak of, why, and what that kept from it, in one line."""
    kept = append_count(", ".join(map(escape_unprintable, suppressed.names)), suppressed.matched - len(suppressed.names))
    told = f"{suppressed.code} for {escape_unprintable(suppressed.parameters)} ({escape_unprintable(suppressed.reason)})"
    return f"{told}: {kept or 'it changes nothing, take it out'}"


def names(finding: Finding) -> list[str]:
    """The parameters or buffers that a finding names."""
    return [escape_unprintable(str(name)) for name in finding.evidence.get("names", ())]


def to_json(value: Any) -> str:
    """Indented JSON. A number that JSON has no word for (a norm may be infinite) becomes a string."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
