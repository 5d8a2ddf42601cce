"""Rules of the audit by code: the `RULES` of each module of this package, and of the entry-point group `benchbox.rules`."""

from __future__ import annotations

import pkgutil
import re
from functools import cache
from importlib import import_module

from benchbox.audit.rules.base import Rule
from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.extensions import with_extensions
from benchbox.registry.names import did_you_mean

# `--select`, `explain` and suppressions compare codes in upper case, and `BXP2` selects the family of that prefix.
_CODE = re.compile(r"[A-Z]+[0-9]+")


@cache
def rules() -> dict[str, Rule]:
    """Return every rule by code, sorted: the built-in rules and those of installed distributions.

    Raises:
        ConfigurationError: an entry point cannot be loaded, is not a rule, or has a code that is invalid or already in use.
    """
    built_in: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.code not in built_in, f"two rules are called {rule.code}"
            built_in[rule.code] = rule
    extended = with_extensions("benchbox.rules", Rule, built_in, name=lambda rule: rule.code, defect=_invalid_code)
    return dict(sorted(extended.items()))


def _invalid_code(rule: Rule) -> str | None:
    if _CODE.fullmatch(rule.code):
        return None
    return f"has the code {rule.code!r}, which is not upper-case letters followed by digits, such as ACME101"


def rule(code: str) -> Rule:
    """Return the rule with a code, in any case.

    Raises:
        ConfigurationError: no rule has this code.
    """
    upper_code = code.upper()
    if upper_code not in rules():
        raise ConfigurationError(Problem("", f"unknown rule {code!r}", rule_hint(upper_code)))
    return rules()[upper_code]


def rule_hint(code: str) -> str:
    """Return the hint that follows an unknown code: the nearest rule, or the command that lists them."""
    return did_you_mean(code.upper(), rules()) or "see benchbox list rules"
