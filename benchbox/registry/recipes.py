"""Precision recipes by name: what is stored, what computes, what the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision arrangement. Storage is the dtype of live parameters, compute that of matrix products, stepped that of the
    tensors (masters, where there are any) and moments the optimizer updates; None leaves it to the backend, whatever it keeps.

    `compensation` is what keeps 16-bit parameters, stepped without masters, from losing small updates.
    """

    name: str
    summary: str
    storage: str
    compute: str
    stepped: str | None
    compensation: Literal["stochastic rounding", "Kahan summation"] | None = None
    needs: str | None = None  # a module of the optional extra `lowbit`

    @property
    def masters(self) -> bool:
        """Whether the optimizer is to step float32 copies of 16-bit live parameters."""
        return self.stepped is not None and self.stepped != self.storage

    def missing(self) -> str | None:
        """What must be installed before this recipe can run, or None. Nothing is imported."""
        if self.needs is None or find_spec(self.needs) is not None:
            return None
        return f"recipe {self.name} needs the module {self.needs}, which is not installed: pip install 'benchbox[lowbit]'"


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
            name="bf16_stochastic",
            summary="everything in bfloat16, each new weight rounded up or down at random: torchao's AdamW",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            compensation="stochastic rounding",
            needs="torchao",
        ),
        Recipe(
            name="bf16_kahan",
            # optimi multiplies weights by 1 - lr * weight_decay outside the sum, and a bfloat16 weight comes out as it went in.
            summary="everything in bfloat16, what rounding takes from a weight kept for the next step: optimi's AdamW. Weight "
            "decay has no part in that and is lost unless lr * weight_decay is above 2^-9",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            compensation="Kahan summation",
            needs="optimi",
        ),
        Recipe(
            name="bf16_naive",
            summary="cast to bfloat16 before the optimizer is built, float32 masters left to the backend: right on those that "
            "keep some, known to lose small updates on the others",
            storage="bfloat16",
            compute="bfloat16",
            stepped=None,
        ),
        Recipe(
            name="bf16_pure",
            summary="everything in bfloat16, Adam state too: known to lose small updates, kept for demonstration",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
        ),
    )
}
