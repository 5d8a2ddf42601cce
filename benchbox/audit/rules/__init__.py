"""Rules by code. A rule is declared in a file of this folder and found there: adding one is adding a file."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.audit.facts import Census
    from benchbox.audit.findings import Finding
    from benchbox.audit.rules.rule import Rule


@cache
def rules() -> dict[str, Rule]:
    """Every rule by code: the `RULES` of each module here."""
    found: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(__path__):
        for rule in getattr(import_module(f"{__name__}.{module.name}"), "RULES", ()):
            assert rule.code not in found, f"two rules are called {rule.code}"
            found[rule.code] = rule
    return dict(sorted(found.items()))


def run_rules(censuses: Sequence[Census]) -> list[Finding]:
    """Every rule over the censuses of all ranks, in code order: what fired, and what could not be judged."""
    return [finding for rule in rules().values() for finding in rule.findings(censuses)]
