"""Names that an adapter builds, as far as its `presets.yaml` says: planning imports no adapter.

A size may have `names`, a mapping of all names that are built at this size to their settings, `synthetic`, a list of those that
generate their batches, and `folders: true` where a path is built too. Without `names`, a name is known when it is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from benchbox.registry.policies import PolicyEntry


def name_refusal(entry: PolicyEntry, size: str) -> tuple[str, str] | None:
    """Return why an adapter does not build a name at a size, and what to do; None if it may, and for other policies."""
    names, takes_folders = entry.presets[size].get("names"), entry.presets[size].get("folders", False)
    if entry.source is None or names is None or entry.source in names or (takes_folders and "/" in entry.source):
        return None
    adapter, hint = entry.name.partition(":")[0], did_you_mean(entry.source, names)
    if takes_folders and Path(entry.source).is_dir():
        hint = f"a folder is written with a slash: {adapter}:./{entry.source}"
    return f"adapter {adapter} has no policy {entry.source!r} at size {size}", hint


def data_refusal(entry: PolicyEntry, size: str, data_kind: str) -> tuple[str, str] | None:
    """Return why a policy of an adapter cannot read such data, and what to do; None if it can, or if that is not known."""
    if data_kind == "synthetic" or entry.source not in entry.presets[size].get("synthetic", ()):
        return None
    return f"policy {entry.name} generates its batches, and reads no dataset", "write data: synthetic"
