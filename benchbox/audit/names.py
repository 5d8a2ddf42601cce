"""Folding of tensor names for people: `blocks.0-11.*` instead of a hundred names."""

from __future__ import annotations

from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DIGITS = frozenset("0123456789{")
_MIN_FOLDED = 3  # names: two are shorter as they are


def fold_names(names: Iterable[str]) -> list[str]:
    """Return shorter names that stand for the same tensors, in the order of the first of each.

    Names that differ only in numbers become one (`blocks.0-11.norm.weight`), and three or more such with the same numbers one
    with a star (`blocks.0-11.*`), which stands for these names, not for every tensor below.
    """
    numbers_by_form: dict[tuple[str | None, ...], list[tuple[int, ...]]] = {}
    for name in dict.fromkeys(names):
        parts = name.split(".")
        form = tuple(None if part.isdecimal() else part for part in parts)
        numbers_by_form.setdefault(form, []).append(tuple(int(part) for part in parts if part.isdecimal()))
    folded = [name for form, numbers in numbers_by_form.items() for name in _fold_numbers(form, numbers)]
    return [name for prefix, group in groupby(folded, key=_folded_prefix) for name in _fold_leaves(prefix, list(group))]


def _fold_numbers(form: Sequence[str | None], numbers: Sequence[tuple[int, ...]]) -> list[str]:
    """Return one name with ranges if the numbers are all combinations of some, else a name for each."""
    distinct = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if prod(map(len, distinct)) == len(numbers):
        return [_fill(form, [_format_numbers(column) for column in distinct])]
    return [_fill(form, [str(number) for number in row]) for row in numbers]


def _fill(form: Sequence[str | None], numbers: Iterable[str]) -> str:
    remaining = iter(numbers)
    return ".".join(next(remaining) if part is None else part for part in form)


def _format_numbers(numbers: Sequence[int]) -> str:
    """Format sorted numbers as `0-3` if they are consecutive, as `{0,2}` otherwise."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{numbers[0]}-{numbers[-1]}"
    return "{" + ",".join(map(str, numbers)) + "}" if len(numbers) > 1 else str(numbers[0])


def _folded_prefix(name: str) -> str | None:
    """Return the name up to its last range of numbers, or None if it has none."""
    parts = name.split(".")
    ranges = [index for index, part in enumerate(parts) if part[:1] in _DIGITS and not part.isdecimal()]
    return ".".join(parts[: ranges[-1] + 1]) if ranges else None


def _fold_leaves(prefix: str | None, names: list[str]) -> list[str]:
    return names if prefix is None or len(names) < _MIN_FOLDED else [f"{prefix}.*"]
