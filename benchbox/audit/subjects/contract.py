"""What a precision recipe declares, in the words that rules compare with what was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.observer.facts import Contract

if TYPE_CHECKING:
    from benchbox.registry.recipes import Recipe


def contract(recipe: Recipe) -> Contract:
    """What a recipe declares. Not what is stored: a backend may keep 16-bit copies of float32 shards, or the reverse."""
    return Contract(source=f"recipe {recipe.name}", compute=recipe.compute, stepped=recipe.stepped, moments=recipe.stepped)
