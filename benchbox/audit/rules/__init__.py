"""Rules by code. A rule is declared in a file of this folder and found there: adding one is adding a file."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from benchbox.audit.rules.base import Rule


@cache
def rules() -> dict[str, Rule]:
    """Every rule by code: the `RULES` of each module here."""
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.code not in found, f"two rules are called {rule.code}"
            found[rule.code] = rule
    return dict(sorted(found.items()))


def rule(code: str) -> Rule:
    """The rule of that code.

    Raises:
        ConfigurationError: there is none.
    """
    wanted = code.upper()
    if wanted not in rules():
        raise ConfigurationError(Problem("", f"unknown rule {code!r}", did_you_mean(wanted, rules())))
    return rules()[wanted]
