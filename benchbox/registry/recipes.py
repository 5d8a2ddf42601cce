"""Precision recipes by name: what is stored, what computes, what the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision arrangement. Storage is the dtype of live parameters, compute that of matrix products, stepped that of the
    tensors (masters, where there are any) and moments the optimizer updates.
    """

    name: str
    summary: str
    storage: str
    compute: str
    stepped: str
    known_bad: bool = False


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="fp32",
            summary="float32 throughout",
            storage="float32",
            compute="float32",
            stepped="float32",
        ),
        Recipe(
            name="fp32_autocast",
            summary="float32 parameters, gradients and Adam state; matrix products in bfloat16 under autocast",
            storage="float32",
            compute="bfloat16",
            stepped="float32",
        ),
        Recipe(
            name="bf16_master",
            summary="bfloat16 compute and gradient reduction; float32 masters and Adam state",
            storage="bfloat16",
            compute="bfloat16",
            stepped="float32",
        ),
        Recipe(
            name="bf16_pure",
            summary="everything in bfloat16, Adam state too: known to lose small updates, kept for demonstration",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            known_bad=True,
        ),
    )
}
