"""Policies by name: folders with a `policy.py` and a `presets.yaml`.

They are searched for in `--policy-dir`, `./policies`, the bundled folder, and the packages that installed distributions name in
the entry-point group `benchbox.policies`. All these folders together form one package, `benchbox_policies`, so that a policy
anywhere can import the shared building blocks as `from .._layers.nn.attention import ...`. `benchbox` itself names no policy.

A policy directory may also be the folder of one policy. A name with a colon, such as `hf:qwen2`, is a policy of others: the
adapter before the colon, a folder of `_adapters`, builds it from what stands after the colon.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from benchbox.errors import ConfigurationError, Problem, reason_of
from benchbox.registry.adapted_names import name_refusal
from benchbox.registry.bundled import bundled_folders
from benchbox.registry.extensions import extension_folders
from benchbox.registry.modes import mode_refusal
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.contracts import Axes, Policy

GROUP = "benchbox.policies"
PACKAGE = "benchbox_policies"
PRESETS = "presets.yaml"
ADAPTERS = "_adapters"


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy: its name, its folder, and its presets (`tiny`, `small`, `full`, ...) as read from `presets.yaml`.

    `module` is the name of the folder below `PACKAGE`; `source` is what an adapter builds, after the colon of the name.
    """

    name: str
    folder: Path
    presets: Mapping[str, Mapping[str, Any]]
    module: str = ""
    source: str | None = None


def search_path(policy_dirs: Sequence[Path] = ()) -> list[Path]:
    """Return the folders that may hold policies. Where two hold a policy of one name, the first counts.

    Raises:
        ConfigurationError: a registered package is not installed, or holds a policy of the name of a bundled one.
    """
    # The folder around a single policy comes last: what else is in it must not hide anything.
    parents = [path.parent for path in _single_policies(policy_dirs)]
    return list(dict.fromkeys([*_roots(policy_dirs), *parents]))


def _roots(policy_dirs: Sequence[Path]) -> list[Path]:
    """Return the folders whose subfolders are policies."""
    several = [path for path in policy_dirs if not is_policy_folder(path)]
    candidates = [*several, Path.cwd() / "policies", *bundled_folders("policies"), *_registered_folders()]
    return list(dict.fromkeys(folder for folder in (path.resolve() for path in candidates) if folder.is_dir()))


def _single_policies(policy_dirs: Sequence[Path]) -> list[Path]:
    return [path.resolve() for path in policy_dirs if is_policy_folder(path)]


def is_policy_folder(path: Path) -> bool:
    """Return whether a folder is a policy: it has a `policy.py` and a `presets.yaml`."""
    return (path / "policy.py").is_file() and (path / PRESETS).is_file()


@cache
def _registered_folders() -> tuple[Path, ...]:
    """Return the folders of the entry-point group `benchbox.policies`.

    They come last on the search path, so that `_layers` is always the bundled one.
    """
    owners = {folder.name: "bundled with benchbox" for root in bundled_folders("policies") for folder in _policy_folders(root)}
    roots, problems = extension_folders(GROUP), []
    for root in roots:
        for folder in _policy_folders(root):
            if folder.name in owners:
                message = f"a policy named {folder.name!r} exists already, {owners[folder.name]}"
                problems.append(Problem(str(folder), message, "rename it, or uninstall the package that holds it"))
            owners.setdefault(folder.name, f"in {folder}")
    if problems:
        raise ConfigurationError(problems)
    return tuple(roots)


def find_policies(policy_dirs: Sequence[Path] = ()) -> dict[str, PolicyEntry]:
    """Return every policy by name. Reads YAML, imports nothing.

    Raises:
        ConfigurationError: a `presets.yaml` cannot be read, or a registered package is broken.
    """
    return {name: _entry(folder) for name, folder in _folders(policy_dirs).items()}


def _folders(policy_dirs: Sequence[Path]) -> dict[str, Path]:
    """Return the folder of every policy by name."""
    folders: dict[str, Path] = {}
    for root in _roots(policy_dirs):
        for folder in _policy_folders(root):
            folders.setdefault(folder.name, folder)
    for folder in _single_policies(policy_dirs):
        if (other := folders.setdefault(folder.name, folder)) != folder:
            message = f"a policy named {folder.name!r} exists already, in {other}"
            raise ConfigurationError(Problem(str(folder), message, "rename the folder, or give the folder around it"))
    return folders


def _policy_folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if is_policy_folder(path)]


def _entry(folder: Path) -> PolicyEntry:
    return PolicyEntry(folder.name, folder, _read_presets(folder / PRESETS), module=folder.name)


def adapters() -> dict[str, Path]:
    """Return the folders of the bundled adapters by name."""
    roots = (root / ADAPTERS for root in bundled_folders("policies"))
    return {folder.name: folder for root in roots for folder in _policy_folders(root)}


def _adapted_entry(name: str) -> PolicyEntry:
    adapter, _, source = name.partition(":")
    folders = adapters()
    if adapter not in folders:
        raise ConfigurationError(Problem("", f"unknown adapter {adapter!r} in policy {name!r}", did_you_mean(adapter, folders)))
    if not source:
        raise ConfigurationError(Problem("", f"policy {name!r} names nothing to adapt", f"write {adapter}:NAME"))
    folder = folders[adapter]
    return PolicyEntry(name, folder, _read_presets(folder / PRESETS), module=f"{ADAPTERS}.{adapter}", source=source)


def _read_presets(path: Path) -> dict[str, dict[str, Any]]:
    return _parse_presets(path, path.read_bytes())


@lru_cache  # a rank builds its policy twice, once on the meta device, and parsing takes longer than building
def _parse_presets(path: Path, content: bytes) -> dict[str, dict[str, Any]]:
    try:
        presets = YAML(typ="safe").load(content)
    except (YAMLError, ValueError) as error:  # ValueError: a number or day that is none
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigurationError(Problem(where, f"not YAML: {getattr(error, 'problem', None) or reason_of(error)}")) from None
    if not isinstance(presets, dict) or not all(isinstance(value, dict) for value in presets.values()):
        raise ConfigurationError(Problem(f"{path}:1:1", "presets are a mapping of size to settings"))
    return presets


def policy_entry(name: str, policy_dirs: Sequence[Path] = ()) -> PolicyEntry:
    """Return the policy of that name.

    Raises:
        ConfigurationError: there is none, or its `presets.yaml` cannot be read.
    """
    if ":" in name:
        return _adapted_entry(name)
    folders = _folders(policy_dirs)
    if name not in folders:
        raise ConfigurationError(Problem("", f"unknown policy {name!r}", did_you_mean(name, folders)))
    return _entry(folders[name])


def build_policy(name: str, size: str, axes: Axes, policy_dirs: Sequence[Path] = ()) -> Policy:
    """Import the policy's module and build it, in float32, on torch's current default device.

    Raises:
        ConfigurationError: no such policy, size or mode, or none of that name at that size.
    """
    entry = policy_entry(name, policy_dirs)
    if size not in entry.presets:
        raise ConfigurationError(Problem("", f"policy {name} has no size {size!r}", did_you_mean(size, entry.presets)))
    if refusal := name_refusal(entry, size) or mode_refusal(entry, axes.mode):
        raise ConfigurationError(Problem("", *refusal))
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder) for folder in search_path(policy_dirs)]
    if getattr(sys.modules.get(PACKAGE), "__path__", None) != package.__path__:
        for loaded in [module for module in sys.modules if module.split(".")[0] == PACKAGE]:
            del sys.modules[loaded]
        sys.modules[PACKAGE] = package
    module = importlib.import_module(f"{PACKAGE}.{entry.module}.policy")
    source = () if entry.source is None else (entry.source,)
    policy: Policy = module.build(dict(entry.presets[size]), axes, *source)
    if hasattr(policy, "apply_axes"):  # an adapted module, whose `build` knows nothing of them
        policy.apply_axes(axes)
    return policy
