"""Policies that a file names by a path, `policy: path/to/folder`, or by an adapter, `policy: hf:path/to/config`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.policies import PRESETS, PolicyEntry, find_policies, is_policy_folder, policy_entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.spec.source import Keys, Source


_POLICY = f"a policy is a folder with policy.py and {PRESETS}"


def resolve_policies(
    source: Source, file: Path, policy_dirs: Sequence[Path]
) -> tuple[dict[str, PolicyEntry], list[Path], list[Problem]]:
    """Replace paths of policies by names, and return the policies by name, the policy directories, and the problems.

    A path is relative to the file, on the command line (`--set`) to the working directory. The name of a policy folder is that
    of the folder; a path after the colon of an adapter stays one, relative to the working directory if it is below it.

    Raises:
        ConfigurationError: a `presets.yaml` cannot be read, or a registered package is broken.
    """
    policies, directories, problems = find_policies(policy_dirs), list(policy_dirs), []
    for keys in list(_policy_keys(source)):
        value, where = source.at(keys), source.where(keys)
        base = Path() if where.startswith("--set") else file.parent
        try:
            if ":" in value:
                entry = _adapted(value, base)
            elif "/" in value or os.sep in value:
                entry = _folder(value, base, policies)
                directories.append(entry.folder)
            else:
                _check_no_path(value, base, policies)
                continue
        except ConfigurationError as error:
            problems += [replace(problem, where=problem.where or where) for problem in error.problems]
            entry = PolicyEntry(value, Path(), {})  # so that the name is not reported again
        policies[entry.name] = entry
        _replace(source, keys, entry.name)
    return policies, list(dict.fromkeys(directories)), problems


def named_policies(source: Source) -> set[str]:
    """Return the policies that a file names."""
    return {source.at(keys) for keys in _policy_keys(source)}


def _policy_keys(source: Source) -> Iterator[Keys]:
    """Yield the paths of all values that name a policy."""
    for keys in source.positions:
        names_policy = keys[-1:] == ("policy",) or (keys[:2] == ("axes", "policy") and len(keys) == 3)
        is_data = keys[:1] == ("data",)  # a camera may have any name
        if names_policy and not is_data and isinstance(source.at(keys), str):
            yield keys


def _check_no_path(value: str, base: Path, policies: dict[str, PolicyEntry]) -> None:
    """Raise ConfigurationError for the name of no policy under which a folder or file lies beside the matrix or here."""
    if value not in policies and (hint := _path_hint(value, base)):
        raise ConfigurationError(Problem("", f"unknown policy {value!r}", hint))


def _path_hint(value: str, base: Path) -> str | None:
    for root in (base, Path()):
        path = root / value
        if path.is_file():
            return f"{path} is a file, and {_POLICY}"
        if path.is_dir():
            relative = os.path.relpath(path, base)
            return f"write {relative if '/' in relative else f'./{relative}'}: the path of a folder has a slash"
    return None


def _folder(value: str, base: Path, policies: dict[str, PolicyEntry]) -> PolicyEntry:
    folder = (base / value).resolve()
    if not is_policy_folder(folder):
        missing = "there is no such folder"
        if folder.is_file():
            missing = f"it is a file, and {_POLICY}"
        elif folder.is_dir():
            missing = f"it lacks {' and '.join(name for name in ('policy.py', PRESETS) if not (folder / name).is_file())}"
        raise ConfigurationError(Problem("", f"{value} is not a policy: {missing}", f"it is looked for in {folder}"))
    same_name = policies.get(folder.name)
    if same_name is not None and same_name.folder.resolve() != folder:
        message = f"a policy named {folder.name!r} exists already, in {same_name.folder}"
        hint = f"write {folder.name} to use that one, or rename this folder"  # that one may be the installed copy of this one
        raise ConfigurationError(Problem("", message, hint))
    return policy_entry(folder.name, [folder])


def _adapted(value: str, base: Path) -> PolicyEntry:
    adapter, _, argument = value.partition(":")
    if "/" in argument or os.sep in argument:
        path = (base / argument).resolve()
        if not path.exists():
            raise ConfigurationError(Problem("", f"{argument} of policy {value} does not exist", f"it is looked for in {path}"))
        below = path.is_relative_to(Path.cwd())
        argument = f"./{path.relative_to(Path.cwd()).as_posix()}" if below else str(path)
    return policy_entry(f"{adapter}:{argument}")


def _replace(source: Source, keys: Keys, name: str) -> None:
    parent: Any = source.at(keys[:-1])
    parent[keys[-1]] = name
