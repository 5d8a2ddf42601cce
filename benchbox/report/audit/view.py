"""Content that all formats of an audit share, and its order."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.audit.findings import Finding
    from benchbox.audit.judge import AppliedSuppression, Judgement
    from benchbox.observer.facts import RankFacts, SourceLocation

_SEVERITY_ORDER = ("error", "unknown", "warning", "info")
_LOCATION_LABELS = {
    "optimizer": "optimizer built at",
    "schedule": "schedule built at",
    "cast": "cast at",
    "default dtype": "default dtype set at",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A subject, the facts of all its ranks, and the judgement; `title` is for people, `subject` for programs.

    `failure` is how the subject itself failed, if it did: then the audit fails, whatever it found.
    """

    title: str
    subject: Mapping[str, Any]
    facts: Sequence[RankFacts]
    judgement: Judgement
    failure: str | None = None

    @property
    def chain(self) -> str:
        """Optimizers of the first rank that has any, outermost first."""
        return next((" > ".join(facts.optimizer_chain) for facts in self.facts if facts.optimizer_chain), "")

    @property
    def problems(self) -> list[tuple[int, str]]:
        """(rank, failure of its observer)."""
        return [(facts.rank, problem) for facts in self.facts for problem in facts.problems]


def sort_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings by severity, the worst first, then by code."""
    return sorted(findings, key=lambda finding: (_SEVERITY_ORDER.index(finding.severity), finding.code))


def group_by_reason(not_judged: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the codes that were not judged by their reason."""
    codes: dict[str, list[str]] = {}
    for code, reason in not_judged.items():
        codes.setdefault(reason, []).append(code)
    return codes


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as `0-3` if they are consecutive, as `0, 2` otherwise."""
    distinct = sorted(set(ranks))
    if len(distinct) > 1 and distinct[-1] - distinct[0] + 1 == len(distinct):
        return f"{distinct[0]}-{distinct[-1]}"
    return ", ".join(map(str, distinct))


def format_value(value: Any) -> str:
    """Format a value of a finding's evidence for people."""
    if isinstance(value, list):
        texts = [format_value(item) for item in value]
        return ("; " if any("," in text and " " in text for text in texts) else ", ").join(texts)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else escape_unprintable(str(value))


def evidence_rows(finding: Finding) -> list[tuple[str, str]]:
    """Return (key, text) of a finding's evidence, without the unknown values."""
    more = finding.evidence.get("more")
    rows = []
    for key, value in finding.evidence.items():
        if value is None or key in ("more", "folded"):
            continue
        if key == "names" and "folded" in finding.evidence:
            rows.append((key, f"{len(value) + (more or 0)} tensors: {format_value(finding.evidence['folded'])}"))
            continue
        text = format_ranks(value) if key == "ranks" else format_value(value)
        rows.append((key, _append_count(text, more) if key == "names" else text))
    return rows


def location_rows(finding: Finding) -> list[tuple[str, str]]:
    """Return (what happened there, `file:line in function (name)`) of a finding's locations."""
    return [(_LOCATION_LABELS[location.kind], escape_unprintable(_format_location(location))) for location in finding.locations]


def _format_location(location: SourceLocation) -> str:
    return f"{relative_path(location.file)}:{location.line} in {location.function} ({location.name})"


def relative_path(file: str) -> str:
    """Return a path below the working directory without it, and any other unchanged."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _append_count(names: str, more: int | None) -> str:
    return f"{names} and {more} more" if more else names


def format_finding(finding: Finding) -> str:
    """Format a finding as one line."""
    rows = [("where", escape_unprintable(finding.where)), *evidence_rows(finding), *location_rows(finding)]
    return f"{escape_unprintable(finding.title)} ({'; '.join(f'{key}: {text}' for key, text in rows)})"


def format_suppression(suppressed: AppliedSuppression) -> str:
    """Format a suppression, its reason and the tensors it suppressed as one line."""
    names = ", ".join(map(escape_unprintable, suppressed.names))
    effect = _append_count(names, suppressed.matched - len(suppressed.names)) or "it has no effect, remove it"
    parameters, reason = escape_unprintable(suppressed.parameters), escape_unprintable(suppressed.reason)
    return f"{suppressed.code} for {parameters} ({reason}): {effect}"


def tensor_names(finding: Finding) -> list[str]:
    """Return the parameters or buffers that a finding names."""
    return [escape_unprintable(str(name)) for name in finding.evidence.get("names", ())]


def to_json(value: Any) -> str:
    """Return indented JSON. Numbers that JSON cannot express (a norm may be infinite) become strings."""
    return json.dumps(_replace_nonfinite(value), indent=1, allow_nan=False)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nonfinite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
