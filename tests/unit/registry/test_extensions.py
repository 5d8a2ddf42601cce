"""Entry points of installed distributions: what they add, and the one line that a broken one earns."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.extensions import extension_folders, load_target, with_extensions
from benchbox.registry.recipes import BUILT_IN_RECIPES, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUP = "benchbox.recipes"
MODULE = """\
from benchbox.registry.recipes import Recipe

def recipe(name):
    return Recipe(name=name, summary="", storage="float32", compute="float32", stepped="float32")

MINE = recipe("mine")
TWO = (recipe("one"), recipe("two"))
TAKEN = recipe("fp32")
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a distribution on the path: its module `acme_parts`, and its entry points by group."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_parts.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "acme_parts", raising=False)

    def install(group: str, name: str = "acme", **entries: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {target}" for entry, target in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")

    return install


def problems() -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        with_extensions(GROUP, Recipe, BUILT_IN_RECIPES)
    return str(caught.value).splitlines()


def test_without_entry_points_the_built_in_objects_are_all_there_are() -> None:
    assert with_extensions(GROUP, Recipe, BUILT_IN_RECIPES) == BUILT_IN_RECIPES


def test_entry_points_add_one_object_or_several_after_the_built_in_ones(distribution) -> None:
    distribution(GROUP, mine="acme_parts:MINE", two="acme_parts:TWO")
    assert list(with_extensions(GROUP, Recipe, BUILT_IN_RECIPES)) == [*BUILT_IN_RECIPES, "mine", "one", "two"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("acme_absent:MINE", "cannot be loaded: ModuleNotFoundError: No module named 'acme_absent'"),
        ("acme_parts:MISSING", "cannot be loaded: AttributeError: module 'acme_parts' has no attribute 'MISSING'"),
        ("acme_parts:recipe", "is an object of function, not a benchbox.registry.recipes.Recipe"),
        ("acme_parts:Recipe", "is the class Recipe, not a benchbox.registry.recipes.Recipe"),
        ("acme_parts:TAKEN", "takes the name 'fp32', which belongs to benchbox itself"),
    ],
)
def test_a_broken_entry_point_is_one_line_that_names_it_and_what_to_do(distribution, target: str, problem: str) -> None:
    distribution(GROUP, part=target)
    assert problems() == [
        f"acme, entry point {GROUP}: part: {target} {problem}; update or repair acme, or pip uninstall it",
    ]


def test_two_distributions_cannot_take_one_name(distribution) -> None:
    distribution(GROUP, "acme", mine="acme_parts:MINE")
    distribution(GROUP, "bolt", mine="acme_parts:MINE")
    (line,) = problems()
    assert line.startswith(f"bolt, entry point {GROUP}: mine: acme_parts:MINE takes the name 'mine', which belongs to acme;")


def test_all_broken_entry_points_are_reported_at_once(distribution) -> None:
    distribution(GROUP, a="acme_absent:A", b="acme_parts:TAKEN")
    assert len(problems()) == 2


def test_a_defect_of_an_object_is_reported_like_a_wrong_type(distribution) -> None:
    distribution(GROUP, mine="acme_parts:MINE")
    with pytest.raises(ConfigurationError, match="mine: acme_parts:MINE has no summary; update or repair acme"):
        with_extensions(GROUP, Recipe, BUILT_IN_RECIPES, defect=lambda recipe: None if recipe.summary else "has no summary")


def test_the_folder_of_a_package_is_found_without_importing_it(distribution, tmp_path: Path) -> None:
    (tmp_path / "acme_policies").mkdir()
    (tmp_path / "acme_policies" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    distribution("benchbox.policies", acme="acme_policies")
    assert extension_folders("benchbox.policies") == [tmp_path / "acme_policies"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("acme_absent", "is not installed"),
        ("acme_absent.policies", "cannot be found: ModuleNotFoundError: No module named 'acme_absent'"),
        ("acme_parts", "is a module, not a package whose folder holds policies"),
    ],
)
def test_an_entry_point_that_names_no_package_is_one_line(distribution, target: str, problem: str) -> None:
    distribution("benchbox.policies", acme=target)
    with pytest.raises(ConfigurationError) as caught:
        extension_folders("benchbox.policies")
    assert str(caught.value) == (
        f"acme, entry point benchbox.policies: acme: {target} {problem}; update or repair acme, or pip uninstall it"
    )


def test_a_target_that_cannot_be_imported_names_its_owner() -> None:
    with pytest.raises(ConfigurationError, match=r"^backend acme: acme_absent:Acme cannot be loaded: ModuleNotFoundError"):
        load_target("acme_absent:Acme", "backend acme")


def list_kind(kind: str, path: Path) -> subprocess.CompletedProcess[str]:
    """List what there is of a kind, with the distribution in `path` installed, as a user does."""
    command = [sys.executable, "-m", "benchbox.cli.app", "list", kind]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=variables, cwd=path, capture_output=True, text=True, timeout=60)


def test_a_command_fails_in_one_line_only_if_it_needs_what_is_broken(distribution, tmp_path: Path) -> None:
    """The line says which distribution; a command about something else runs."""
    distribution("benchbox.backends", acme="acme_absent:ACME")
    failed = list_kind("backends", tmp_path)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == (
        "error: acme, entry point benchbox.backends: acme: acme_absent:ACME cannot be loaded: ModuleNotFoundError: "
        "No module named 'acme_absent'; update or repair acme, or pip uninstall it\n"
    )
    assert list_kind("recipes", tmp_path).returncode == 0


def test_a_backend_that_says_not_how_it_is_recognised_is_refused(distribution, tmp_path: Path) -> None:
    """Every cell of it would end as mismatch, after its launch."""
    (tmp_path / "acme_backend.py").write_text(
        "from benchbox.registry.backends import BackendInfo\nACME = BackendInfo(name='acme', summary='', target='x:Y')\n"
    )
    distribution("benchbox.backends", acme="acme_backend:ACME")
    failed = list_kind("backends", tmp_path)
    assert failed.returncode == 2
    assert (
        "acme_backend:ACME declares no recognise=, so that every cell of backend 'acme' would end as mismatch" in failed.stderr
    )


def test_a_policy_cannot_take_the_name_of_a_bundled_one(distribution, tmp_path: Path) -> None:
    folder = tmp_path / "acme_policies" / "pi05"
    folder.mkdir(parents=True)
    (folder / "policy.py").touch()
    (folder / "presets.yaml").write_text("tiny: {}\n")
    distribution("benchbox.policies", acme="acme_policies")
    failed = list_kind("policies", tmp_path)
    assert failed.returncode == 2
    assert failed.stderr == (
        f"error: {folder}: a policy named 'pi05' exists already, bundled with benchbox; "
        "rename it, or uninstall the package that holds it\n"
    )
