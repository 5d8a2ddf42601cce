"""The contract of a backend, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.backends.observe import Observed, observe
from benchbox.optim import clip_coefficient, plan_groups, squared_norm
from benchbox.registry.backends import BackendInfo, backend_info

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from benchbox.optim import GroupPlan
    from benchbox.registry.contracts import Policy
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a backend must know of a step before it is built: DeepSpeed and accelerate fix these at construction."""

    batch: int
    accumulation: int
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A policy made ready to step. Nothing in it is ever rebound.

    `model` is what to call, `optimizer` what accelerate returned, `stepping` the optimizer the schedule is built on: the one
    whose learning rates are read when the step is taken.
    """

    model: nn.Module
    optimizer: Any
    stepping: Optimizer
    schedule: LRScheduler


class Backend(ABC):
    """Prepares a policy and carries out the parts of a step that depend on who shards and reduces.

    A step is, for each micro-batch, `context` around forward and `backward`; then `clip`, `step`, `zero_grad`.
    """

    name: ClassVar[str]
    # Phases this backend cannot tell apart, and why; their time is in the phase named in the reason.
    fused_phases: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        self.prepared: Prepared
        self.device: torch.device
        self.grad_norm: Tensor  # () float32: of the last step, over all ranks, before clipping
        self._recipe: Recipe
        self._shape: StepShape

    @staticmethod
    def environment() -> dict[str, str]:
        """Environment variables that must be set before accelerate or deepspeed look at them."""
        return {}

    @property
    def capabilities(self) -> BackendInfo:
        return backend_info(self.name)

    def prepare(self, policy: Policy, recipe: Recipe, optim: OptimSpec, shape: StepShape) -> Prepared:
        """Groups by name, then shard or wrap, then masters, then optimizer, then the schedule on that optimizer.

        Args:
            policy: built in float32, statistics loaded.
        """
        assert isinstance(policy, nn.Module)
        self._recipe, self._shape = recipe, shape
        plans = plan_groups(policy, policy.parameter_roles(), optim)
        self.prepared = self._prepare(policy, recipe, optim, plans)
        return self.prepared

    @abstractmethod
    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared: ...

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Around forward and backward of one micro-batch; at `boundary` gradients are reduced over ranks."""
        return nullcontext()

    def compute(self) -> AbstractContextManager[Any]:
        """Around forward: autocast, for recipes that compute in another dtype than they store."""
        if self._recipe.storage == self._recipe.compute:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self._recipe.compute])

    def backward(self, loss: Tensor, *, boundary: bool) -> None:  # noqa: ARG002
        """Accumulate the gradient of `loss` / accumulation."""
        (loss / self._shape.accumulation).backward()

    def clip(self) -> None:
        """Set `grad_norm`, and scale the gradients so that it is at most `max_grad_norm`."""
        gradients = [p.grad for p in self.prepared.model.parameters() if p.grad is not None]
        norm = self._sum_over_shards(squared_norm(gradients, self.device)).sqrt()
        coefficient = clip_coefficient(norm, self._shape.max_grad_norm)
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient.dtype))
        self.grad_norm = norm

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Replicated gradients are whole on every rank; sharding backends sum over the ranks that share one copy."""
        return value

    def step(self) -> None:
        self.prepared.optimizer.step()

    def zero_grad(self) -> None:
        self.prepared.optimizer.zero_grad(set_to_none=True)

    @property
    def max_grad_norm(self) -> float:
        """What gradients are clipped to."""
        return self._shape.max_grad_norm

    def observe(self) -> Observed:
        """What is there, read from the live objects and never from the configuration."""
        return observe(self.prepared.model, self.prepared.optimizer, self.device)

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """The mean of a small float32 tensor over all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value


def adamw(groups: list[dict[str, Any]], optim: OptimSpec, recipe: Recipe) -> Optimizer:
    """The recipe's AdamW over groups that carry their own rate and decay: torch's fused one, or one that compensates rounding.

    Raises:
        ImportError: the recipe needs a module that is not installed (`Recipe.missing` says so without trying).
    """
    arguments = adamw_arguments(optim)
    if recipe.compensation == "stochastic rounding":
        from benchbox.optim.stochastic import StochasticAdamW

        return StochasticAdamW(groups, **arguments)
    if recipe.compensation == "Kahan summation":
        import optimi

        kahan: Optimizer = optimi.AdamW(groups, **arguments, kahan_sum=True)
        return kahan
    return torch.optim.AdamW(groups, **arguments, fused=True)


def adamw_arguments(optim: OptimSpec) -> dict[str, Any]:
    """What every AdamW is told."""
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
