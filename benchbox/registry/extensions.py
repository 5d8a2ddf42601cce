"""Extensions: what installed distributions register under the entry-point groups `benchbox.*`.

An entry point of a broken distribution ends a command in one line that names it, and only a command that needs its group.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def with_extensions(
    group: str,
    kind: type[T],
    built_in: Mapping[str, T],
    *,
    name: Callable[[T], str] = lambda item: item.name,  # type: ignore[attr-defined]
    defect: Callable[[T], str | None] = lambda _: None,
) -> dict[str, T]:
    """Return the built-in objects by name, followed by those that the entry points of a group name.

    Args:
        group: `benchbox.backends`, `benchbox.recipes`, ... Each entry point names one object of `kind`, or a list of them.
        name: the name of an object.
        defect: what an object of the right type lacks nevertheless, or None.

    Raises:
        ConfigurationError: an entry point cannot be imported, names something else, or takes a name twice: one line for each.
    """
    objects, origins, problems = dict(built_in), dict.fromkeys(built_in, "benchbox itself"), []
    for entry in _entry_points(group):
        try:
            value = entry.load()
        except Exception as error:  # noqa: BLE001 (code of others may raise anything)
            problems.append(_problem(entry, f"cannot be loaded: {type(error).__name__}: {error}"))
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(item, kind):
                problems.append(_problem(entry, f"is {_describe(item)}, not a {kind.__module__}.{kind.__name__}"))
            elif name(item) in origins:
                problems.append(_problem(entry, f"takes the name {name(item)!r}, which belongs to {origins[name(item)]}"))
            elif (reason := defect(item)) is not None:
                problems.append(_problem(entry, reason))
            else:
                objects[name(item)], origins[name(item)] = item, _distribution(entry)
    if problems:
        raise ConfigurationError(problems)
    return objects


def extension_folders(group: str) -> list[Path]:
    """Return the folders of the packages that the entry points of a group name. No package is imported.

    Raises:
        ConfigurationError: an entry point names no package.
    """
    folders: list[Path] = []
    problems = []
    for entry in _entry_points(group):
        try:
            spec = find_spec(entry.module)
        except Exception as error:  # noqa: BLE001 (the package around it is imported, and may raise anything)
            problems.append(_problem(entry, f"cannot be found: {type(error).__name__}: {error}"))
            continue
        if spec is None or spec.submodule_search_locations is None:
            problem = "is not installed" if spec is None else "is a module, not a package whose folder holds policies"
            problems.append(_problem(entry, problem))
        else:
            # pip leaves the folder of an uninstalled package where a policy has been imported from it: with __pycache__ alone.
            locations = [Path(location) for location in spec.submodule_search_locations]
            sources = [location for location in locations if any(location.rglob("*.py"))]
            if not sources:
                where = " and ".join(map(str, locations))
                remedy = f"delete what an earlier installation left there, or repair {_distribution(entry)}"
                problems.append(_problem(entry, f"is {where}, without any Python file", remedy))
            # The sources of an installed namespace package, in the working directory of a rank, are a second location of it.
            installed = Path(str(entry.dist.locate_file(entry.module.replace(".", "/")))) if entry.dist else None
            folders += [installed] if installed in sources else sources
    if problems:
        raise ConfigurationError(problems)
    return list(dict.fromkeys(folders))  # a namespace package may have one folder twice


def load_target(target: str, owner: str) -> Any:
    """Import the object that `module:attribute` names.

    Args:
        owner: who declares it, as an error names it: `backend ddp`.

    Raises:
        ConfigurationError: there is no such module or attribute, or importing it fails.
    """
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # code of others may raise anything
        problem = Problem(owner, f"{target} cannot be loaded: {type(error).__name__}: {error}", "repair what declares it")
        raise ConfigurationError(problem) from error


def _entry_points(group: str) -> Iterable[EntryPoint]:
    """Return the entry points of a group, sorted: the order in which distributions are found is an accident."""
    entries = _all_entry_points(_search_path()).select(group=group)
    return sorted(entries, key=lambda entry: (_distribution(entry), entry.name))


def _search_path() -> tuple[tuple[str, int | None], ...]:
    """Return the folders in which distributions are searched for, and the time at which each last got or lost one."""
    return tuple((folder, _modified_ns(folder)) for folder in sys.path)


def _modified_ns(folder: str) -> int | None:
    with suppress(OSError):
        return os.stat(folder or os.curdir).st_mtime_ns  # noqa: PTH116 (an entry of sys.path)
    return None


@lru_cache(maxsize=1)  # a search takes 20 ms
def _all_entry_points(search_path: tuple[tuple[str, int | None], ...]) -> Any:  # noqa: ARG001 (until it changes)
    return metadata.entry_points()


def _problem(entry: EntryPoint, message: str, remedy: str | None = None) -> Problem:
    distribution = _distribution(entry)
    remedy = remedy or f"update or repair {distribution}, or pip uninstall it"
    return Problem(f"{distribution}, entry point {entry.group}: {entry.name}", f"{entry.value} {message}", remedy)


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _describe(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"
