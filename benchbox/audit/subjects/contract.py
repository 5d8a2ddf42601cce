"""The declared precision of a recipe, in the terms that rules compare with the facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.observer.facts import Contract

if TYPE_CHECKING:
    from benchbox.registry.recipes import Recipe


def recipe_contract(recipe: Recipe) -> Contract:
    """Return the contract of a recipe, which leaves storage open: backends may store shards in either precision."""
    return Contract(source=f"recipe {recipe.name}", compute=recipe.compute, stepped=recipe.stepped, moments=recipe.stepped)
