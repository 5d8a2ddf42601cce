"""What an audit is to look at: which rules, what is suppressed and why, and what was there before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from benchbox.audit.rules import rules
from benchbox.errors import ConfigurationError, Problem, RecordError
from benchbox.registry.names import did_you_mean
from benchbox.spec.fields import Strict
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.source import read_source
from benchbox.store.files import read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchbox.audit.findings import Finding

Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """Parameters (by a glob over their names) that a rule says nothing of, and why."""

    rule: str
    parameters: str
    reason: str


@dataclass(frozen=True, slots=True)
class BaselineFinding:
    """What makes a finding the same as an earlier one: rule, severity, title and place, and the tensors it is about. Of many,
    a finding names some and counts the others.
    """

    kind: tuple[str, ...]
    names: frozenset[str]
    more: int

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> BaselineFinding:
        """From a finding as JSON holds it."""
        evidence = finding.get("evidence") or {}
        kind = tuple(str(finding.get(part)) for part in ("code", "severity", "title", "where"))
        return cls(kind, frozenset(map(str, evidence.get("names") or ())), int(evidence.get("more") or 0))

    def includes(self, other: BaselineFinding) -> bool:
        """Whether the other is about no more than this, and the tensors it names are named here or may be among the counted."""
        fewer = len(other.names) + other.more <= len(self.names) + self.more
        return self.kind == other.kind and fewer and len(other.names - self.names) <= self.more


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`select` and `ignore` hold beginnings of codes: `BXP2` is every rule of that family. Without `select` all are taken."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    suppressions: tuple[Suppression, ...] = ()
    baseline: frozenset[BaselineFinding] = frozenset()

    def selects(self, code: str) -> bool:
        return (not self.select or code.startswith(self.select)) and not code.startswith(self.ignore or ("-",))

    def knows(self, finding: Finding) -> bool:
        """Whether the baseline has this finding: the same rule at the same place, about nothing else than then."""
        found = BaselineFinding.of(finding.to_dict())
        return any(known.includes(found) for known in self.baseline)


def codes(given: Iterable[str], option: str) -> tuple[str, ...]:
    """Codes, or beginnings of codes, from comma-separated lists.

    Raises:
        ConfigurationError: no rule's code begins so.
    """
    found = tuple(part.strip().upper() for each in given for part in each.split(",") if part.strip())
    for code in found:
        if not any(known.startswith(code) for known in rules()):
            raise ConfigurationError(Problem(option, f"no rule is called {code!r}", did_you_mean(code, rules())))
    return found


class _Entry(Strict):
    rule: Text
    """The code of a rule."""
    parameters: Text
    """A glob over parameter or buffer names."""
    reason: Annotated[str, Field(min_length=8)]
    """Why the rule is wrong here: for whoever reads this file next year."""


class _File(Strict):
    suppress: list[_Entry]
    """What rules must not speak of."""


def load_suppressions(path: Path) -> tuple[Suppression, ...]:
    """Read a file of suppressions.

        suppress:
          - {rule: BXP101, parameters: "*.norm.weight", reason: "steps are large enough: EDQ 0.99 over 10,000 steps"}

    Raises:
        ConfigurationError: with every problem in it, each at its file:line:column.
    """
    source = read_source(path)
    problems = list(source.problems)
    try:
        entries = _File.model_validate(source.values).suppress
    except ValidationError as error:
        raise ConfigurationError(in_order([*problems, *problems_of(error, _File, source)])) from None
    for place, entry in enumerate(entries):
        if entry.rule not in rules():
            where = source.where(("suppress", place, "rule"))
            problems.append(Problem(where, f"unknown rule {entry.rule!r}", did_you_mean(entry.rule, rules())))
    if problems:
        raise ConfigurationError(in_order(problems))
    return tuple(Suppression(rule=entry.rule, parameters=entry.parameters, reason=entry.reason) for entry in entries)


def load_baseline(path: Path) -> frozenset[BaselineFinding]:
    """The findings of an earlier audit, from what `audit-precision --format json` printed.

    Raises:
        ConfigurationError: the file is none of these.
    """
    try:
        held = read_json(path)
    except RecordError as error:
        raise ConfigurationError(Problem("--baseline", str(error))) from None
    found = held.get("findings")
    if not isinstance(found, list) or not all(isinstance(each, dict) and "code" in each for each in found):
        hint = "make one with benchbox audit-precision ... --format json"
        raise ConfigurationError(Problem("--baseline", f"{path} holds no findings of an audit", hint))
    return frozenset(BaselineFinding.of(each) for each in [*found, *held.get("known", ())])
