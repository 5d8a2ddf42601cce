"""Backends by name: what a plan must know of them without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.registry.recipes import RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A backend's name, where its class is (`module:attribute`), and what it cannot do."""

    name: str
    summary: str
    target: str
    min_ranks: int = 2
    max_ranks: int | None = None
    ranks_multiple_of: int = 1
    recipes: tuple[str, ...] = tuple(RECIPES)
    no_other_recipe_because: str = ""
    checkpointing: bool = True
    no_checkpointing_because: str = ""
    saves: bool = False  # whether the trainer can save and resume it

    def refusal(self, *, world_size: int, recipe: str, checkpointing: bool) -> str | None:
        """Why this backend cannot run such a cell, or None when it can."""
        if self.max_ranks is not None and world_size > self.max_ranks:
            return f"{self.name} runs on {_at_most(self.max_ranks)}, and world_size is {world_size}"
        if world_size < self.min_ranks:
            return f"{self.name} needs at least {self.min_ranks} ranks, and world_size is {world_size}"
        if world_size % self.ranks_multiple_of:
            return f"{self.name} needs a multiple of {self.ranks_multiple_of} ranks, and world_size is {world_size}"
        if recipe not in self.recipes:
            return f"{self.name} has no {recipe} recipe: {self._why_no_other_recipe()}"
        if missing := RECIPES[recipe].missing():
            return missing
        if checkpointing and not self.checkpointing:
            return f"{self.name} refuses activation checkpointing: {self.no_checkpointing_because}"
        return None

    def limits(self) -> list[str]:
        """What it cannot do, in words: the general form of what `refusal` says of one cell."""
        found = []
        if self.max_ranks is not None:
            found.append(_at_most(self.max_ranks))
        if self.min_ranks > 1:
            found.append(f"at least {self.min_ranks} ranks")
        if self.ranks_multiple_of > 1:
            found.append(f"a multiple of {self.ranks_multiple_of} ranks")
        if lacking := [recipe for recipe in RECIPES if recipe not in self.recipes]:
            found.append(f"no recipe {' or '.join(lacking)}: {self._why_no_other_recipe()}")
        if not self.checkpointing:
            found.append(f"no activation checkpointing: {self.no_checkpointing_because}")
        return found

    def _why_no_other_recipe(self) -> str:
        return self.no_other_recipe_because or f"it has {', '.join(self.recipes)}"

    def load(self) -> Any:
        """The backend class. Imports torch."""
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


def _at_most(ranks: int) -> str:
    return f"at most {ranks} rank{'s' if ranks > 1 else ''}"


# ZeRO steps tensors of its own, made when the engine is; what compensates rounding in the live parameters has no place there.
_ZERO_RECIPES: dict[str, Any] = {
    "recipes": tuple(name for name, recipe in RECIPES.items() if recipe.compensation is None),
    "no_other_recipe_because": "DeepSpeed steps flat tensors of its own in place of the bfloat16 parameters",
}

_BUILT_IN = (
    BackendInfo(
        name="single",
        summary="one process, nothing sharded",
        target="benchbox.backends.replicated:Single",
        min_ranks=1,
        max_ranks=1,
        saves=True,
    ),
    BackendInfo(
        name="ddp",
        summary="DistributedDataParallel: everything replicated, gradients all-reduced",
        target="benchbox.backends.replicated:Ddp",
        saves=True,
    ),
    BackendInfo(
        name="fsdp1_full",
        summary="FSDP1 FULL_SHARD: parameters, gradients and optimizer state sharded",
        target="benchbox.backends.fsdp1:Fsdp1Full",
    ),
    BackendInfo(
        name="fsdp1_grad_op",
        summary="FSDP1 SHARD_GRAD_OP: gradients and optimizer state sharded, parameters gathered from forward to backward",
        target="benchbox.backends.fsdp1:Fsdp1GradOp",
    ),
    BackendInfo(
        name="fsdp2",
        summary="FSDP2 fully_shard: parameters and optimizer state are DTensors sharded on dimension 0",
        target="benchbox.backends.fsdp2:Fsdp2",
    ),
    BackendInfo(
        name="hsdp",
        summary="FSDP2 on a 2-D mesh: sharded within pairs of ranks, replicated across them",
        target="benchbox.backends.fsdp2:Hsdp",
        min_ranks=4,
        ranks_multiple_of=2,
    ),
    BackendInfo(
        name="zero1",
        summary="DeepSpeed ZeRO-1: optimizer state partitioned",
        target="benchbox.backends.deepspeed:Zero1",
        **_ZERO_RECIPES,
    ),
    BackendInfo(
        name="zero2",
        summary="DeepSpeed ZeRO-2: optimizer state and gradients partitioned",
        target="benchbox.backends.deepspeed:Zero2",
        **_ZERO_RECIPES,
    ),
    BackendInfo(
        name="zero3",
        summary="DeepSpeed ZeRO-3: parameters, gradients and optimizer state partitioned",
        target="benchbox.backends.deepspeed:Zero3",
        **_ZERO_RECIPES,
        checkpointing=False,
        no_checkpointing_because="recomputing a layer meets parameters that ZeRO-3 has already released; use zero2 or fsdp2",
    ),
)


@cache
def backends() -> dict[str, BackendInfo]:
    """Every backend by name: the built-in ones, then those of the entry-point group `benchbox.backends`."""
    found = {info.name: info for info in _BUILT_IN}
    for entry in entry_points(group="benchbox.backends"):
        info = entry.load()
        found[info.name] = info
    return found


def backend_info(name: str) -> BackendInfo:
    """The backend of that name.

    Raises:
        ConfigurationError: there is none.
    """
    known = backends()
    if name not in known:
        raise ConfigurationError(Problem("", f"unknown backend {name!r}", did_you_mean(name, known)))
    return known[name]
