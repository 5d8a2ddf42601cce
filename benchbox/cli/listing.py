"""`benchbox list`: the names that a matrix can use."""

import json
import textwrap
from enum import StrEnum
from typing import Annotated, Any

import typer

from benchbox.cli.options import Format, FormatOption, PolicyDirOption

Rows = list[dict[str, Any]]


class Listing(StrEnum):
    """Registry to list."""

    policies = "policies"
    backends = "backends"
    recipes = "recipes"
    freezing = "freezing"
    metrics = "metrics"
    rules = "rules"


def list_registered(
    kind: Annotated[Listing, typer.Argument(help="Registry to list.", show_default=False)],
    policy_dirs: PolicyDirOption,
    form: FormatOption = Format.text,
) -> None:
    """List policies, backends, recipes, metrics or rules."""
    if kind is Listing.policies:
        rows = _policies(policy_dirs)
    else:
        listings = {
            Listing.backends: _backends,
            Listing.recipes: _recipes,
            Listing.freezing: _freezing,
            Listing.metrics: _metrics,
            Listing.rules: _rules,
        }
        rows = listings[kind]()
    if form is Format.json:
        print(json.dumps(rows, indent=2))
        return
    if kind is Listing.rules:
        for row in rows:
            print(
                f"{row['name']}  {row['severity']:<8} {row['title']}" + (f" ({row['conditions']})" if row["conditions"] else "")
            )
        return
    for row in rows:
        name, *details = (", ".join(value) if isinstance(value, list) else value for value in row.values())
        print(name)
        for text in filter(None, details):
            print(textwrap.indent(textwrap.fill(str(text), 76, break_on_hyphens=False, break_long_words=False), "    "))


def _policies(folders: PolicyDirOption) -> Rows:
    from benchbox.registry.declarations import policy_summary
    from benchbox.registry.policies import adapters, find_policies, policy_entry

    entries = [*find_policies(folders).values(), *(policy_entry(f"{adapter}:NAME") for adapter in adapters())]
    return [
        {
            "name": entry.name,
            "summary": policy_summary((entry.folder / "policy.py").read_bytes()),
            "sizes": list(entry.presets),
            "folder": str(entry.folder),
        }
        for entry in entries
    ]


def _backends() -> Rows:
    from benchbox.registry.backends import backends

    return [{"name": info.name, "summary": info.summary, "limits": info.limits()} for info in backends().values()]


def _recipes() -> Rows:
    from benchbox.registry.recipes import recipes

    return [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "dtypes": f"stored {recipe.storage}, computed {recipe.compute}, stepped {recipe.stepped or 'as the backend keeps'}",
        }
        for recipe in recipes().values()
    ]


def _freezing() -> Rows:
    from benchbox.registry.freezing import FREEZE_PRESETS

    return [{"name": preset.name, "summary": preset.summary} for preset in FREEZE_PRESETS.values()]


def _metrics() -> Rows:
    from benchbox.registry.metrics import metrics

    better = {"lower": "lower is better", "higher": "higher is better", "none": "neither way is better"}
    return [
        {"name": metric.name, "unit": metric.unit, "direction": better[metric.direction], "formula": metric.formula}
        for metric in metrics().values()
    ]


def _rules() -> Rows:
    from benchbox.audit.rules import rules

    return [
        {"name": rule.code, "severity": rule.severity, "conditions": rule.conditions, "title": rule.title}
        for rule in rules().values()
    ]
