"""`--set size=full,axes.batch=[1,2]`: values laid over a matrix before it is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.spec.source import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.spec.source import Source


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Return the value of each key of the `--set` options; of several, the last. Values are YAML, null removes a key.

    Raises:
        ConfigurationError: a part is not `key=value`.
    """
    overrides: dict[str, str] = {}
    problems = []
    for part in (part for text in texts for part in split_at_commas(text)):
        key, equals, value = part.partition("=")
        if not equals or not all(step.strip() for step in key.split(".")):
            problems.append(Problem(f"--set {part}", "is not key=value", "write it as --set measure.steps=3"))
        overrides[key.strip()] = value.strip()
    if problems:
        raise ConfigurationError(problems)
    return overrides


def apply_overrides(source: Source, overrides: Mapping[str, str]) -> list[Problem]:
    """Replace values of a file by the overrides, whose positions are then their `--set`. Return the overrides' problems."""
    problems = []
    for key, text in overrides.items():
        position, keys = f"--set {key}={text}", tuple(key.split("."))
        parents = [keys[:depth] for depth in range(1, len(keys))]
        blocked = next((parent for parent in parents if not isinstance(source.at(parent, {}), dict)), None)
        if blocked:
            problems.append(
                Problem(position, f"{'.'.join(blocked)} is not a mapping here", f"set {'.'.join(blocked)} as a whole")
            )
            continue
        try:
            value = parse(text, position, position=position)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        problems.extend(value.problems)
        source.graft(keys, value)
    return problems
