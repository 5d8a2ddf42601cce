"""Precision recipes by name: what is stored, what computes, what the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, get_args

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.extensions import load_target, with_extensions
from benchbox.registry.names import did_you_mean

GROUP = "benchbox.recipes"
JUDGED_STEPS = 22  # the first of a launch, warm-up included: rounding was measured over as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Relative differences of loss and gradient norm that rounding explains between two set-ups of the same training.

    The first step has its own: no update has amplified anything yet. From the second step on a tolerance is constant, since the
    differences did not grow any more within `JUDGED_STEPS`.
    """

    first_loss: float
    loss: float
    first_grad_norm: float
    grad_norm: float

    def at(self, quantity: Literal["loss", "grad_norm"], step: int) -> float:
        """Return the tolerance in a step, counted from 0."""
        first, later = (self.first_loss, self.loss) if quantity == "loss" else (self.first_grad_norm, self.grad_norm)
        return first if step == 0 else later


RecipeDtype = Literal["float32", "bfloat16"]
TORCH_ADAMW = "benchbox.backends.optimizers:fused_adamw"
# Numbers that an optimizer keeps for each element: two moments, and KahanAdamW what rounding lost.
STATES_PER_ELEMENT = {
    TORCH_ADAMW: 2,
    "torch.optim:AdamW": 2,
    "benchbox.optim.stochastic:StochasticAdamW": 2,
    "benchbox.optim.kahan:KahanAdamW": 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A precision arrangement. Storage is the dtype of live parameters, compute that of matrix products, stepped that of the
    tensors (masters, where there are any) and moments the optimizer updates; None leaves it to the backend, whatever it keeps.

    `optimizer` is the target, `module:attribute`, of what builds the optimizer: called with parameter groups and the keyword
    arguments lr, betas, eps and weight_decay, it returns a `torch.optim.Optimizer`. Where backends keep masters for the recipe
    it must be an optimizer class or a `functools.partial` of one.

    `compensation` names what keeps 16-bit parameters, stepped without masters, from losing small updates.
    """

    name: str
    summary: str
    storage: RecipeDtype
    compute: RecipeDtype
    stepped: RecipeDtype | None
    optimizer: str = TORCH_ADAMW
    compensation: str | None = None
    requires: str | None = None  # a module that is not among the dependencies of benchbox
    install: str = ""  # the command that installs it
    tolerance: Tolerance | None = None  # None: cells are not judged for equivalence

    @property
    def masters(self) -> bool:
        """Return whether the optimizer is to step float32 copies of 16-bit live parameters."""
        return self.stepped is not None and self.stepped != self.storage

    def missing(self) -> str | None:
        """Return what must be installed before this recipe can run, or None. Nothing is imported."""
        if self.requires is None or find_spec(self.requires) is not None:
            return None
        remedy = f": {self.install}" if self.install else ""
        return f"recipe {self.name} needs the module {self.requires}, which is not installed{remedy}"

    def load_optimizer(self) -> Any:
        """Return what builds the optimizer. Imports torch.

        Raises:
            ConfigurationError: it cannot be imported.
        """
        return load_target(self.optimizer, f"recipe {self.name}")


# Five times the largest differences measured between set-ups of the same training that are correct, rounded up: on CPUs, by
# matrices/reduction_order.yaml and in the published runs (docs/measuring.md has the figures). float32: 3.3e-6 in 40 steps. With
# products in bfloat16: loss 9.5e-4 in the first step, then 2.5e-3; gradient norm 4.2e-3, then 1.2e-2.
_FP32 = Tolerance(first_loss=2e-5, loss=2e-5, first_grad_norm=2e-5, grad_norm=2e-5)
_BF16 = Tolerance(first_loss=0.005, loss=0.0125, first_grad_norm=0.025, grad_norm=0.06)
TF32_TOLERANCE = _BF16  # float32 products of a GPU in TF32, which keeps three bits more than bfloat16

_LOWBIT = "pip install 'benchbox[lowbit]'"

BUILT_IN_RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="fp32",
            summary="float32 throughout",
            storage="float32",
            compute="float32",
            stepped="float32",
            tolerance=_FP32,
        ),
        Recipe(
            name="fp32_autocast",
            summary="float32 parameters, gradients and Adam state; matrix products in bfloat16 under autocast",
            storage="float32",
            compute="bfloat16",
            stepped="float32",
            tolerance=_BF16,
        ),
        Recipe(
            name="bf16_master",
            summary="bfloat16 compute and gradient reduction; float32 masters and Adam state",
            storage="bfloat16",
            compute="bfloat16",
            stepped="float32",
            tolerance=_BF16,
        ),
        Recipe(
            name="bf16_stochastic",
            summary="everything in bfloat16, each new weight rounded up or down at random: torchao's AdamW",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            optimizer="benchbox.optim.stochastic:StochasticAdamW",
            compensation="stochastic rounding",
            requires="torchao",
            install=_LOWBIT,
            tolerance=_BF16,
        ),
        Recipe(
            name="bf16_kahan",
            # optimi multiplies weights by 1 - lr * weight_decay outside the sum, which leaves most bfloat16 weights unchanged.
            summary="everything in bfloat16, the rounding error of each weight kept for the next step: optimi's AdamW. Weight "
            "decay is not compensated and is lost unless lr * weight_decay is above 2^-9",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            optimizer="benchbox.optim.kahan:KahanAdamW",
            compensation="Kahan summation",
            requires="optimi",
            install=_LOWBIT,
            tolerance=_BF16,
        ),
        Recipe(
            name="bf16_naive",
            summary="cast to bfloat16 before the optimizer is built, float32 masters left to the backend: correct on backends "
            "that keep masters, known to lose small updates on the others",
            storage="bfloat16",
            compute="bfloat16",
            stepped=None,
            tolerance=_BF16,
        ),
        Recipe(
            name="bf16_pure",
            summary="everything in bfloat16, Adam state too: known to lose small updates, kept for demonstration",
            storage="bfloat16",
            compute="bfloat16",
            stepped="bfloat16",
            tolerance=_BF16,
        ),
    )
}


@cache
def recipes() -> dict[str, Recipe]:
    """Return every recipe by name: the built-in ones, then those of the entry-point group `benchbox.recipes`.

    Raises:
        ConfigurationError: an entry point is broken.
    """
    return with_extensions(GROUP, Recipe, BUILT_IN_RECIPES, defect=_unknown_dtype)


def _unknown_dtype(recipe: Recipe) -> str | None:
    for field in ("storage", "compute", "stepped"):
        dtype, known = getattr(recipe, field), get_args(RecipeDtype)
        if dtype not in known and not (field == "stepped" and dtype is None):
            return f"declares {field}={dtype!r} for recipe {recipe.name!r}, and backends know {' and '.join(known)}"
    return None


def recipe_by_name(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in recipes():
        raise ConfigurationError(Problem("", f"unknown recipe {name!r}", did_you_mean(name, recipes())))
    return recipes()[name]
