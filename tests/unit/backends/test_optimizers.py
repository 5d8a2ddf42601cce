"""The optimizers that recipes name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from benchbox.backends.optimizers import adamw_arguments, build_master_optimizer, build_optimizer
from benchbox.errors import ConfigurationError
from benchbox.registry.recipes import BUILT_IN_RECIPES
from benchbox.spec.cell import OptimSpec

FP32, BF16_MASTER = BUILT_IN_RECIPES["fp32"], BUILT_IN_RECIPES["bf16_master"]
OPTIM = OptimSpec()


def groups(dtype: torch.dtype = torch.float32) -> list[dict]:
    return [{"params": list(nn.Linear(2, 1).to(dtype).parameters()), "lr": 0.5}]


def build_list(parameters: list, **arguments: float) -> list:
    return []


amsgrad = partial(torch.optim.AdamW, amsgrad=True)


def test_a_recipe_is_stepped_by_the_optimizer_it_names() -> None:
    """The factory gets the groups with their options, and the arguments of AdamW as defaults."""
    optimizer = build_optimizer(replace(FP32, optimizer=f"{__name__}:amsgrad"), groups(), OPTIM)
    (group,) = optimizer.param_groups
    assert (group["amsgrad"], group["lr"]) == (True, 0.5)
    assert {name: group[name] for name in ("betas", "eps", "weight_decay")} == {
        name: value for name, value in adamw_arguments(OPTIM).items() if name != "lr"
    }


def test_the_built_in_recipes_without_compensation_are_stepped_by_the_fused_adamw() -> None:
    optimizer = build_optimizer(FP32, groups(), OPTIM)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["fused"] is True


def test_masters_are_stepped_by_an_instance_of_the_class_that_the_recipe_names() -> None:
    live = groups(torch.bfloat16)
    masters = [parameter.detach().float() for parameter in live[0]["params"]]
    optimizer = build_master_optimizer(replace(BF16_MASTER, optimizer=f"{__name__}:amsgrad"), live, OPTIM, masters)
    assert type(optimizer.inner) is torch.optim.AdamW
    assert optimizer.inner.param_groups[0]["amsgrad"] is True


def test_what_is_no_optimizer_is_refused_with_the_recipe_that_names_it() -> None:
    recipe = replace(FP32, optimizer=f"{__name__}:build_list")
    with pytest.raises(ConfigurationError, match=r"recipe fp32: .*:build_list returned an object of list, not a torch.optim"):
        build_optimizer(recipe, groups(), OPTIM)
    with pytest.raises(
        ConfigurationError, match=r"build_list must be a subclass of torch.optim.Optimizer or a functools.partial"
    ):
        build_master_optimizer(recipe, groups(), OPTIM, [])
