"""Folders of policies that installed distributions register."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from benchbox.registry.extensions import extension_folders

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_sources_of_an_installed_package_are_not_a_second_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have the working directory on their path, and a package without `__init__.py` extends over all of the path."""
    sources, site = tmp_path / "sources", tmp_path / "site"
    for root in (sources, site):
        (root / "named_anew").mkdir(parents=True)
    metadata = site / "named_anew-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: named-anew\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[a.group.of.tests]\nnamed_anew = named_anew\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(sources)
    importlib.invalidate_caches()
    assert extension_folders("a.group.of.tests") == [site / "named_anew"]
