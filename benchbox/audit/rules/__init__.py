"""Rules of the audit by code: the `RULES` of each module of this package, and of the entry-point group `benchbox.rules`."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from benchbox.audit.rules.base import Rule
from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

ENTRY_POINT_GROUP = "benchbox.rules"
# `--select`, `explain` and suppressions compare codes in upper case, and `BXP2` selects the family of that prefix.
_CODE = re.compile(r"[A-Z]+[0-9]+")


@cache
def rules() -> dict[str, Rule]:
    """Return every rule by code, sorted: the built-in rules and those of installed distributions.

    Raises:
        ConfigurationError: an entry point cannot be loaded, is not a rule, or has a code that is invalid or already in use.
    """
    by_code: dict[str, Rule] = {}
    origins: dict[str, str] = {}
    for module in pkgutil.iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.code not in by_code, f"two rules are called {rule.code}"
            by_code[rule.code] = rule
            origins[rule.code] = "benchbox"
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        origin = _describe(entry_point)
        for rule in _load_rules(entry_point):
            if not _CODE.fullmatch(rule.code):
                hint = "a code is upper-case letters followed by digits, such as ACME101"
                raise ConfigurationError(Problem(origin, f"invalid rule code {rule.code!r}", hint))
            if rule.code in by_code:
                hint = "give the rule another code, or uninstall one of the two packages"
                raise ConfigurationError(
                    Problem(origin, f"rule code {rule.code} is already in use by {origins[rule.code]}", hint)
                )
            by_code[rule.code] = rule
            origins[rule.code] = origin
    return dict(sorted(by_code.items()))


def _load_rules(entry_point: EntryPoint) -> list[Rule]:
    """Return the rules of an entry point: one `Rule`, or an iterable of them."""
    origin = _describe(entry_point)
    try:
        value = entry_point.load()
    except Exception as error:
        hint = "update or uninstall the package"
        raise ConfigurationError(
            Problem(origin, f"{entry_point.value} cannot be loaded ({type(error).__name__}: {error})", hint)
        ) from error
    loaded = [value] if isinstance(value, Rule) else list(value) if isinstance(value, Iterable) else None
    if loaded is None or not all(isinstance(rule, Rule) for rule in loaded):
        hint = "point it to a benchbox.audit.rules.base.Rule or an iterable of them"
        raise ConfigurationError(Problem(origin, f"{entry_point.value} is neither a rule nor a list of rules", hint))
    return loaded


def _describe(entry_point: EntryPoint) -> str:
    distribution = f" of {entry_point.dist.name}" if entry_point.dist is not None else ""
    return f"entry point {entry_point.name!r} ({ENTRY_POINT_GROUP}){distribution}"


def rule(code: str) -> Rule:
    """Return the rule with a code, in any case.

    Raises:
        ConfigurationError: no rule has this code.
    """
    upper_code = code.upper()
    if upper_code not in rules():
        raise ConfigurationError(Problem("", f"unknown rule {code!r}", did_you_mean(upper_code, rules())))
    return rules()[upper_code]
