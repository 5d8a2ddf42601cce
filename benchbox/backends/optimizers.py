"""The optimizers of recipes: one AdamW, built as the recipe's precision needs it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchbox.errors import ConfigurationError, Problem
from benchbox.optim import MasterWeightOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec

Groups = list[dict[str, Any]]

fused_adamw = partial(torch.optim.AdamW, fused=True)


def build_optimizer(recipe: Recipe, groups: Groups, optim: OptimSpec) -> Optimizer:
    """Build the recipe's optimizer over groups that carry their own rate and decay.

    Raises:
        ConfigurationError: the recipe's optimizer cannot be imported, or is something else.
        ImportError: the recipe needs a module that is not installed (`Recipe.missing` says so without trying).
    """
    optimizer = recipe.load_optimizer()(groups, **adamw_arguments(optim))
    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f"{recipe.optimizer} returned an object of {type(optimizer).__name__}, not a torch.optim.Optimizer"
        raise ConfigurationError(Problem(f"recipe {recipe.name}", message, "repair what declares it"))
    return optimizer


def build_master_optimizer(
    recipe: Recipe, groups: Groups, optim: OptimSpec, masters: Sequence[Tensor]
) -> MasterWeightOptimizer:
    """Build a `MasterWeightOptimizer` over 16-bit groups, whose float32 masters the recipe's optimizer steps.

    Raises:
        ConfigurationError: the recipe's optimizer is neither an optimizer class nor a `functools.partial` of one.
    """
    factory = recipe.load_optimizer()
    inner, keywords = (factory.func, factory.keywords) if isinstance(factory, partial) else (factory, {})
    if not isinstance(inner, type) or not issubclass(inner, torch.optim.Optimizer):
        message = f"{recipe.optimizer} must be a subclass of torch.optim.Optimizer or a functools.partial of one"
        raise ConfigurationError(Problem(f"recipe {recipe.name}", message, "masters are stepped by an instance of that class"))
    return MasterWeightOptimizer(groups, inner, masters=masters, **adamw_arguments(optim), **keywords)


def adamw_arguments(optim: OptimSpec) -> dict[str, Any]:
    """Return the keyword arguments that every AdamW takes."""
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
