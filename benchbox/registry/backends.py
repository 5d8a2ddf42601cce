"""Backends by name: what a plan must know of them without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, get_args

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.contracts import CompileMode
from benchbox.registry.extensions import load_target, with_extensions
from benchbox.registry.names import did_you_mean
from benchbox.registry.recipes import Recipe, recipe_by_name, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "benchbox.backends"
DEFAULT_SHARD_SIZE = 2


class SetUp(Protocol):
    """Fields of a cell for which a backend may refuse it."""

    @property
    def world_size(self) -> int: ...
    @property
    def shard_size(self) -> int | None: ...
    @property
    def recipe(self) -> str: ...
    @property
    def checkpointing(self) -> bool: ...
    @property
    def compile(self) -> CompileMode: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """Declaration of a backend: its name, its class, how it is recognised, and what it cannot do.

    `target` is the class, `module:attribute`, a `benchbox.backends.base.Backend`.

    `recognise` is a function, `module:attribute`, called with the wrapped model and the chain of optimizers, outermost first.
    It returns a short description of the sharding when these live objects are this backend's, and None otherwise, whichever
    backend was requested. The built-in backends need none: the observer identifies them by their wrappers.
    """

    name: str
    summary: str
    target: str
    recognise: str | None = None
    min_ranks: int = 2
    max_ranks: int | None = None
    hybrid: bool = False  # whether it shards within groups of `shard_size` ranks and replicates across the groups
    supports_recipe: Callable[[Recipe], bool] = lambda _: True
    no_other_recipe_because: str = ""
    checkpointing: bool = True
    no_checkpointing_because: str = ""
    compile_modes: tuple[CompileMode, ...] = ("off", "blocks", "model")
    no_other_compile_because: str = ""
    shards_optimizer: bool = False  # whether each rank steps fewer elements than the policy trains

    @property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes that this backend runs."""
        return tuple(name for name, recipe in recipes().items() if self.supports_recipe(recipe))

    def refusal(self, cell: SetUp) -> str | None:
        """Return why this backend cannot run a cell, or None when it can. See `registry.refusals` for what none can run."""
        if cell.shard_size is not None and not self.hybrid:
            hybrids = ", ".join(name for name, info in backends().items() if info.hybrid)
            return f"{self.name} has no shard_size: it is for {hybrids}"
        if ranks_refusal := self.ranks_refusal(cell.world_size, cell.shard_size):
            return ranks_refusal
        declared = recipes().get(cell.recipe)
        if declared is None or not self.supports_recipe(declared):
            return f"{self.name} has no {cell.recipe} recipe: {self._why_no_other_recipe()}"
        if missing := recipe_by_name(cell.recipe).missing():
            return missing
        if cell.checkpointing and not self.checkpointing:
            return f"{self.name} refuses activation checkpointing: {self.no_checkpointing_because}"
        if cell.compile not in self.compile_modes:
            return f"{self.name} refuses compile: {cell.compile}: {self.no_other_compile_because}"
        return None

    def ranks_refusal(self, world_size: int, shard_size: int | None = None) -> str | None:
        """Return why this backend cannot run with that number of ranks, or None when it can."""
        size = (shard_size or DEFAULT_SHARD_SIZE) if self.hybrid else 1
        min_ranks = max(self.min_ranks, 2 * size) if self.hybrid else self.min_ranks
        if self.max_ranks is not None and world_size > self.max_ranks:
            return f"{self.name} runs on {_at_most(self.max_ranks)}, and world_size is {world_size}"
        if world_size < min_ranks:
            return f"{self.name} needs at least {min_ranks} ranks, and world_size is {world_size}"
        if world_size % size:
            return f"{self.name} needs a multiple of {size} ranks, and world_size is {world_size}"
        return None

    def limits(self) -> list[str]:
        """Return the limitations in words: the general form of what `refusal` says of one cell."""
        limits = []
        if self.max_ranks is not None:
            limits.append(_at_most(self.max_ranks))
        if self.min_ranks > 1:
            limits.append(f"at least {self.min_ranks} ranks")
        if self.hybrid:
            limits.append(f"a multiple of shard_size ranks, {DEFAULT_SHARD_SIZE} by default")
        if lacking := [recipe for recipe in recipes() if recipe not in self.recipes]:
            limits.append(f"no recipe {' or '.join(lacking)}: {self._why_no_other_recipe()}")
        if not self.checkpointing:
            limits.append(f"no activation checkpointing: {self.no_checkpointing_because}")
        if lacking := [mode for mode in get_args(CompileMode) if mode not in self.compile_modes]:
            limits.append(f"no compile: {' or '.join(lacking)}: {self.no_other_compile_because}")
        return limits

    def _why_no_other_recipe(self) -> str:
        return self.no_other_recipe_because or f"it has {', '.join(self.recipes)}"

    def load(self) -> Any:
        """Return the backend class. Imports torch.

        Raises:
            ConfigurationError: it cannot be imported.
        """
        return load_target(self.target, f"backend {self.name}")

    def load_recogniser(self) -> Callable[[Any, list[Any]], Any]:
        """Return the function that `recognise` names. Imports torch.

        Raises:
            ConfigurationError: it cannot be imported.
        """
        assert self.recognise is not None, f"{self.name} is recognised by the observer"
        recogniser: Callable[[Any, list[Any]], Any] = load_target(self.recognise, f"backend {self.name}")
        return recogniser


def _at_most(ranks: int) -> str:
    return f"at most {ranks} rank{'s' if ranks > 1 else ''}"


# ZeRO steps flat tensors that its engine makes, so an optimizer that compensates rounding in the live parameters cannot work.
_ZERO_RECIPES: dict[str, Any] = {
    "supports_recipe": lambda recipe: recipe.compensation is None,
    "no_other_recipe_because": "DeepSpeed steps flat tensors of its own in place of the bfloat16 parameters",
}

BUILT_IN_BACKENDS: dict[str, BackendInfo] = {
    info.name: info
    for info in (
        BackendInfo(
            name="single",
            summary="one process, nothing sharded",
            target="benchbox.backends.replicated:Single",
            min_ranks=1,
            max_ranks=1,
        ),
        BackendInfo(
            name="ddp",
            summary="DistributedDataParallel: everything replicated, gradients all-reduced",
            target="benchbox.backends.replicated:Ddp",
        ),
        BackendInfo(
            name="fsdp1_full",
            summary="FSDP1 FULL_SHARD: parameters, gradients and optimizer state sharded",
            target="benchbox.backends.fsdp1:Fsdp1Full",
            shards_optimizer=True,
        ),
        BackendInfo(
            name="fsdp1_grad_op",
            summary="FSDP1 SHARD_GRAD_OP: gradients and optimizer state sharded, parameters gathered from forward to backward",
            target="benchbox.backends.fsdp1:Fsdp1GradOp",
            shards_optimizer=True,
        ),
        BackendInfo(
            name="fsdp1_hybrid",
            summary="FSDP1 HYBRID_SHARD: as fsdp1_full within groups of ranks, replicated across them",
            target="benchbox.backends.fsdp1:Fsdp1Hybrid",
            shards_optimizer=True,
            min_ranks=4,
            hybrid=True,
        ),
        BackendInfo(
            name="fsdp1_hybrid_grad_op",
            summary="FSDP1 _HYBRID_SHARD_ZERO2: as fsdp1_grad_op within groups of ranks, replicated across them",
            target="benchbox.backends.fsdp1:Fsdp1HybridGradOp",
            shards_optimizer=True,
            min_ranks=4,
            hybrid=True,
        ),
        BackendInfo(
            name="fsdp2",
            summary="FSDP2 fully_shard: parameters and optimizer state are DTensors sharded on dimension 0",
            target="benchbox.backends.fsdp2:Fsdp2",
            shards_optimizer=True,
        ),
        BackendInfo(
            name="hsdp",
            summary="FSDP2 on a 2-D mesh: sharded within groups of ranks, replicated across them",
            target="benchbox.backends.fsdp2:Hsdp",
            shards_optimizer=True,
            min_ranks=4,
            hybrid=True,
        ),
        BackendInfo(
            name="zero1",
            summary="DeepSpeed ZeRO-1: optimizer state partitioned",
            target="benchbox.backends.deepspeed:Zero1",
            shards_optimizer=True,
            **_ZERO_RECIPES,
        ),
        BackendInfo(
            name="zero2",
            summary="DeepSpeed ZeRO-2: optimizer state and gradients partitioned",
            target="benchbox.backends.deepspeed:Zero2",
            shards_optimizer=True,
            **_ZERO_RECIPES,
        ),
        BackendInfo(
            name="zero3",
            summary="DeepSpeed ZeRO-3: parameters, gradients and optimizer state partitioned",
            target="benchbox.backends.deepspeed:Zero3",
            shards_optimizer=True,
            **_ZERO_RECIPES,
            checkpointing=False,
            no_checkpointing_because="recomputing a layer meets parameters that ZeRO-3 has already released; "
            "use zero2 or fsdp2",
        ),
    )
}


@cache
def backends() -> dict[str, BackendInfo]:
    """Return every backend by name: the built-in ones, then those of the entry-point group `benchbox.backends`.

    Raises:
        ConfigurationError: an entry point is broken, or its backend does not say how it is recognised.
    """
    return with_extensions(GROUP, BackendInfo, BUILT_IN_BACKENDS, defect=_missing_recogniser)


def _missing_recogniser(info: BackendInfo) -> str | None:
    if info.recognise is not None:
        return None
    return f"declares no recognise=, so that every cell of backend {info.name!r} would end as mismatch"


def backend_info(name: str) -> BackendInfo:
    """Return the declaration of the backend of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in backends():
        raise ConfigurationError(Problem("", f"unknown backend {name!r}", did_you_mean(name, backends())))
    return backends()[name]
