"""Policies by name: folders with a `policy.py` and a `presets.yaml`, in `--policy-dir`, `./policies`, or the bundled copy.

All search folders together form one package, `benchbox_policies`, so that a policy anywhere can import the shared building
blocks as `from .._layers.nn.attention import ...`. `benchbox` itself never names a policy.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.contracts import Axes, Policy

PACKAGE = "benchbox_policies"
PRESETS = "presets.yaml"


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy folder: its name, where it is, and its presets (`tiny`, `small`, `full`, ...) as read from `presets.yaml`."""

    name: str
    folder: Path
    presets: Mapping[str, Mapping[str, Any]]


def search_path(extra: Sequence[Path] = ()) -> list[Path]:
    """Folders that may hold policies, first match wins."""
    package = Path(__file__).resolve().parent.parent
    candidates = [*extra, Path.cwd() / "policies", package / "_bundled" / "policies", package.parent / "policies"]
    found: list[Path] = []
    for candidate in candidates:
        resolved = candidate.resolve()
        if resolved.is_dir() and resolved not in found:
            found.append(resolved)
    return found


def find_policies(extra: Sequence[Path] = ()) -> dict[str, PolicyEntry]:
    """Every policy by name. Reads YAML, imports nothing.

    Raises:
        ConfigurationError: a `presets.yaml` cannot be read.
    """
    return {name: _entry(folder) for name, folder in _folders(extra).items()}


def _folders(extra: Sequence[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in search_path(extra):
        for folder in sorted(root.iterdir()):
            if (folder / "policy.py").is_file() and (folder / PRESETS).is_file():
                found.setdefault(folder.name, folder)
    return found


def _entry(folder: Path) -> PolicyEntry:
    return PolicyEntry(folder.name, folder, _read_presets(folder / PRESETS))


def _read_presets(path: Path) -> dict[str, dict[str, Any]]:
    try:
        presets = YAML(typ="safe").load(path)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigurationError(Problem(where, f"not YAML: {getattr(error, 'problem', error)}")) from None
    if not isinstance(presets, dict) or not all(isinstance(value, dict) for value in presets.values()):
        raise ConfigurationError(Problem(f"{path}:1:1", "presets are a mapping of size to settings"))
    return presets


def policy_entry(name: str, extra: Sequence[Path] = ()) -> PolicyEntry:
    """The policy of that name.

    Raises:
        ConfigurationError: there is none, or its `presets.yaml` cannot be read.
    """
    known = _folders(extra)
    if name not in known:
        raise ConfigurationError(Problem("", f"unknown policy {name!r}", did_you_mean(name, known)))
    return _entry(known[name])


def build_policy(name: str, size: str, axes: Axes, extra: Sequence[Path] = ()) -> Policy:
    """Import the policy's module and build it, in float32, on torch's current default device.

    Raises:
        ConfigurationError: no such policy or size.
    """
    entry = policy_entry(name, extra)
    if size not in entry.presets:
        raise ConfigurationError(Problem("", f"policy {name} has no size {size!r}", did_you_mean(size, entry.presets)))
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder) for folder in search_path(extra)]
    if getattr(sys.modules.get(PACKAGE), "__path__", None) != package.__path__:
        for loaded in [module for module in sys.modules if module.split(".")[0] == PACKAGE]:
            del sys.modules[loaded]
        sys.modules[PACKAGE] = package
    module = importlib.import_module(f"{PACKAGE}.{name}.policy")
    policy: Policy = module.build(dict(entry.presets[size]), axes)
    return policy
