"""Scope of an audit: selected rules, suppressions with their reasons, and a baseline of earlier findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from benchbox.audit.rules import rule_hint, rules
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.source import read_source
from benchbox.spec.types import Strict
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchbox.audit.findings import Finding

Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """Parameters, as a glob over their names, that a rule does not report, and the reason."""

    rule: str
    parameters: str
    reason: str


@dataclass(frozen=True, slots=True)
class BaselineFinding:
    """A finding of an earlier audit, as far as new ones are compared with it.

    `identity` is its rule, severity, title and place; `names` are the tensors it names, and `more` counts the others.
    """

    identity: tuple[str, ...]
    names: frozenset[str]
    more: int

    @classmethod
    def from_dict(cls, finding: Mapping[str, Any]) -> BaselineFinding:
        """Read a finding from its JSON form."""
        evidence = finding.get("evidence") or {}
        identity = tuple(str(finding.get(key)) for key in ("code", "severity", "title", "where"))
        return cls(identity, frozenset(map(str, evidence.get("names") or ())), int(evidence.get("more") or 0))

    def includes(self, finding: BaselineFinding) -> bool:
        """Return whether a finding is no larger than this one, and each tensor it names is named or may be counted here."""
        no_larger = len(finding.names) + finding.more <= len(self.names) + self.more
        return self.identity == finding.identity and no_larger and len(finding.names - self.names) <= self.more


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rules and findings to consider.

    `select` and `ignore` hold prefixes of codes: `BXP2` is every rule of that family. Without `select` all rules are selected.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    suppressions: tuple[Suppression, ...] = ()
    baseline: frozenset[BaselineFinding] = frozenset()

    def selects(self, code: str) -> bool:
        return (not self.select or code.startswith(self.select)) and not code.startswith(self.ignore or ("-",))

    def in_baseline(self, finding: Finding) -> bool:
        """Return whether the baseline includes this finding: the same rule at the same place, on no further tensors."""
        candidate = BaselineFinding.from_dict(finding.to_dict())
        return any(earlier.includes(candidate) for earlier in self.baseline)


def parse_codes(values: Iterable[str], option: str) -> tuple[str, ...]:
    """Split comma-separated lists of codes or prefixes of codes.

    Raises:
        ConfigurationError: no rule's code begins with one of them.
    """
    codes = tuple(part.strip().upper() for value in values for part in value.split(",") if part.strip())
    for code in codes:
        if not any(rule_code.startswith(code) for rule_code in rules()):
            raise ConfigurationError(Problem(option, f"no rule is called {code!r}", rule_hint(code)))
    return codes


class _SuppressionEntry(Strict):
    rule: Text
    """The code of a rule."""
    parameters: Text
    """A glob over parameter or buffer names."""
    reason: Annotated[str, Field(min_length=8)]
    """Why the rule is wrong here: for whoever reads this file next year."""


class _SuppressionFile(Strict):
    suppress: list[_SuppressionEntry]
    """Parameters that rules do not report."""


def load_suppressions(path: Path) -> tuple[Suppression, ...]:
    """Read a file of suppressions.

        suppress:
          - {rule: BXP101, parameters: "*.norm.weight", reason: "steps are large enough: EDQ 0.99 over 10,000 steps"}

    Raises:
        ConfigurationError: with every problem in it, each at its file:line:column.
    """
    source = read_source(path, beginning="suppress:")
    problems = list(source.problems)
    try:
        entries = _SuppressionFile.model_validate(source.values).suppress
    except ValidationError as error:
        raise ConfigurationError(in_order([*problems, *problems_of(error, _SuppressionFile, source)])) from None
    for index, entry in enumerate(entries):
        if entry.rule.upper() not in rules():
            where = source.where(("suppress", index, "rule"))
            problems.append(Problem(where, f"unknown rule {entry.rule!r}", rule_hint(entry.rule)))
    if problems:
        raise ConfigurationError(in_order(problems))
    return tuple(Suppression(rule=entry.rule.upper(), parameters=entry.parameters, reason=entry.reason) for entry in entries)


def load_baseline(path: Path) -> frozenset[BaselineFinding]:
    """Read the findings of an earlier audit from the output of `audit-precision --format json`.

    Raises:
        ConfigurationError: the file is not such a report.
    """
    hint = "give the output of benchbox audit-precision ... --format json"
    try:
        report = read_json(path, hint)
    except RecordError as error:
        raise ConfigurationError(Problem("--baseline", str(error))) from None
    findings = report.get("findings")
    if not isinstance(findings, list) or not all(isinstance(finding, dict) and "code" in finding for finding in findings):
        raise ConfigurationError(Problem("--baseline", f"{path} holds no findings of an audit", hint))
    return frozenset(BaselineFinding.from_dict(finding) for finding in [*findings, *report.get("known", ())])
