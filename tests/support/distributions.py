"""Installed distributions as `importlib.metadata` finds them: a module and a `.dist-info` folder with entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_distribution(folder: Path, name: str, group: str, entries: dict[str, str]) -> None:
    """Write the metadata of a distribution whose entry points of a group are `entries` (name: target) into a folder."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {target}" for entry, target in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
