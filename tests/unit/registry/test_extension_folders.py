"""Folders of policies that installed distributions register."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.extensions import extension_folders

if TYPE_CHECKING:
    from pathlib import Path


GROUP = "a.group.of.tests"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources of a package without `__init__.py`, on the path before those of others."""
    folder = tmp_path / "sources"
    _write_package(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed distribution of that package, so far without the package itself."""
    folder = tmp_path / "site"
    metadata = folder / "named_anew-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: named-anew\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nnamed_anew = named_anew\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    return folder


def _write_package(folder: Path) -> None:
    policy = folder / "named_anew" / "abc"
    policy.mkdir(parents=True)
    (policy / "policy.py").touch()


def _write_remains(folder: Path) -> None:
    """Write what `pip uninstall` leaves of a package from which a policy was imported."""
    cache = folder / "named_anew" / "abc" / "__pycache__"
    cache.mkdir(parents=True)
    (cache / "policy.cpython-311.pyc").touch()


def test_the_sources_of_an_installed_package_are_not_a_second_copy_of_it(site: Path, sources: Path) -> None:
    """Ranks have the working directory on their path, and a package without `__init__.py` extends over all of the path."""
    _write_package(site)
    assert extension_folders(GROUP) == [site / "named_anew"]


def test_what_an_earlier_installation_left_does_not_hide_the_sources(site: Path, sources: Path) -> None:
    """The case of `pip install .`, a run, and `pip install -e .`."""
    _write_remains(site)
    assert extension_folders(GROUP) == [sources / "named_anew"]


def test_a_package_of_which_only_an_earlier_installation_is_left_is_one_line(site: Path) -> None:
    """An editable installation of a package with `__init__.py` cannot be found behind such a folder."""
    _write_remains(site)
    with pytest.raises(ConfigurationError) as caught:
        extension_folders(GROUP)
    folder = site / "named_anew"
    problem = f"named_anew is {folder}, without any Python file"
    remedy = "delete what an earlier installation left there, or repair named-anew"
    assert str(caught.value) == f"named-anew, entry point {GROUP}: named_anew: {problem}; {remedy}"
