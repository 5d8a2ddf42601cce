"""The section of a report on the environment: what all launches share, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.report.sections import flatten_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.analysis.summary import CellSummary
    from benchbox.report.cell_lists import CellLists

HEADERS = ("what differs", "value", "launches", "cells")
MAX_VALUES = 20  # of a key; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDifferences:
    """Keys of the environment in which launches differ. Rows are texts under `HEADERS`."""

    summary: str
    mixed: tuple[str, ...]  # keys in which launches of one cell differ, so that its figures are of two environments
    rows: tuple[tuple[str, ...], ...]
    headers: tuple[str, ...] = HEADERS


def environment_texts(summaries: Sequence[CellSummary]) -> list[tuple[dict[str, str], list[int]]]:
    """Return every environment as text by dotted key, with the positions of the cells of its ok launches, one for a launch."""
    environments: dict[str, tuple[Mapping[str, Any], list[int]]] = {}
    for position, summary in enumerate(summaries):
        for record in summary.ok:
            environment = record["environment"] or {}
            environments.setdefault(repr(environment), (environment, []))[1].append(position)
    return [(dict(flatten_text(environment)), positions) for environment, positions in environments.values()]


def list_environment(environments: Sequence[tuple[Mapping[str, str], Sequence[int]]]) -> tuple[tuple[str, str], ...]:
    """Return the environment of all ok launches by key; several values where launches differ."""
    values_by_key: dict[str, dict[str, None]] = {}
    for texts, _ in environments:
        for key, value in texts.items():
            values_by_key.setdefault(key, {})[value] = None
    return tuple((key, " | ".join(values)) for key, values in values_by_key.items())


def environment_section(
    environments: Sequence[tuple[Mapping[str, str], Sequence[int]]], cell_lists: CellLists
) -> EnvironmentDifferences | None:
    """Return the section; None for a run of which no environment was recorded."""
    environments = [(texts, positions) for texts, positions in environments if texts]
    if not environments:
        return None
    keys = dict.fromkeys(key for texts, _ in environments for key in texts)
    differing = {key: values for key in keys if len(values := _positions_by_value(environments, key)) > 1}
    launches = sum(len(positions) for _, positions in environments)
    if not differing:
        environment = "The only launch has one" if launches == 1 else f"All {launches} launches had the same"
        return EnvironmentDifferences(
            summary=f"{environment} environment in all {len(keys)} recorded values.", mixed=(), rows=()
        )
    mixed = tuple(key for key, values in differing.items() if _is_mixed(values))
    note = "Launches of one cell differ in none of them." if not mixed else ""
    return EnvironmentDifferences(
        summary=f"{launches} launches differ in {len(differing)} of {len(keys)} recorded values. {note}".rstrip(),
        mixed=mixed,
        rows=tuple(row for key, values in differing.items() for row in _rows(key, values, cell_lists)),
    )


def _positions_by_value(environments: Sequence[tuple[Mapping[str, str], Sequence[int]]], key: str) -> dict[str, list[int]]:
    """Return positions of cells by the value of a key; an environment that lacks the key does not count."""
    values: dict[str, list[int]] = {}
    for texts, positions in environments:
        if key in texts:
            values.setdefault(texts[key], []).extend(positions)
    return values


def _is_mixed(values: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a cell has launches with different values."""
    cells = [set(positions) for positions in values.values()]
    return sum(map(len, cells)) > len(set().union(*cells))


def _rows(key: str, values: Mapping[str, Sequence[int]], cell_lists: CellLists) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (key, value, str(len(positions)), cell_lists.text(set(positions)))
        for value, positions in list(values.items())[:MAX_VALUES]
    ]
    if len(values) > MAX_VALUES:
        others = list(values.values())[MAX_VALUES:]
        rows.append((key, f"{len(others)} more values", str(sum(map(len, others))), cell_lists.text(set().union(*others))))
    return rows
