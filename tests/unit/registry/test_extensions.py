"""Entry points of installed distributions: what they add, and the one line that a broken one earns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.extensions import extension_folders, load_target, with_extensions
from benchbox.registry.recipes import BUILT_IN_RECIPES, Recipe, recipes
from tests.support.distributions import write_distribution

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GROUP = "benchbox.recipes"
MODULE = """\
from benchbox.registry.recipes import Recipe

def recipe(name, **dtypes):
    return Recipe(name=name, summary="", **{"storage": "float32", "compute": "float32", "stepped": "float32"} | dtypes)

MINE = recipe("mine")
TWO = (recipe("one"), recipe("two"))
TAKEN = recipe("fp32")
FP16 = [recipe("half", storage="float16"), recipe("torch", stepped="torch.float32"), recipe("none", compute=None)]
FP16 += [recipe("open", stepped=None)]
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a distribution on the path: its module `acme_parts`, and its entry points by group."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "acme_parts.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "acme_parts", raising=False)

    def install(group: str, name: str = "acme", **entries: str) -> None:
        write_distribution(tmp_path, name, group, entries)

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


def test_a_recipe_of_dtypes_that_no_backend_has_is_refused_when_it_is_loaded(distribution) -> None:
    distribution(GROUP, mine="acme_parts:FP16", other="acme_parts:MINE")
    recipes.cache_clear()
    with pytest.raises(ConfigurationError) as caught:
        recipes()
    recipes.cache_clear()
    problems = [line.partition("acme_parts:FP16 ")[2].partition(";")[0] for line in str(caught.value).splitlines()]
    assert problems == [
        "declares storage='float16' for recipe 'half', and backends know float32 and bfloat16",
        "declares stepped='torch.float32' for recipe 'torch', and backends know float32 and bfloat16",
        "declares compute=None for recipe 'none', and backends know float32 and bfloat16",
    ]


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
