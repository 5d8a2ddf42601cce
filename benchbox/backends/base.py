"""The contract of a backend, and what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.backends.deferred import materialise_policy
from benchbox.backends.observe import Observed, observe
from benchbox.backends.settings import read_settings
from benchbox.observer.introspect.wrappers import optimizer_chain
from benchbox.optim import clip_coefficient, plan_groups, scale_gradients, squared_norm
from benchbox.registry.backends import BackendInfo, backend_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from benchbox.optim import GroupPlan
    from benchbox.registry.contracts import Policy
    from benchbox.registry.launch_record import Setting
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step that a backend must know before it is built: DeepSpeed and accelerate fix them at construction."""

    batch: int
    accumulation: int
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A policy made ready to step. Nothing in it is ever rebound.

    `model` is the wrapped policy to call, `optimizer` what accelerate returned, `stepping` the optimizer that the schedule is
    built on: its learning rates are in force in a step.
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
    # Phases that this backend cannot time separately, and why; their time is in the phase that the reason names.
    fused_phases: ClassVar[dict[str, str]] = {}
    # Whether `_prepare` takes a policy on the meta device and fills its shards itself, from `take_deferred_weights`. A backend
    # that replicates the parameters gets them all on the rank's device.
    fills_shards: ClassVar[bool] = False

    def __init__(self) -> None:
        self.enter_stage: Callable[[str], None] = lambda _: None  # to report a long part of `prepare`
        self.prepared: Prepared
        self.device: torch.device
        self.grad_norm: Tensor  # () float32: of the last step, over all ranks, before clipping
        self._recipe: Recipe
        self._shape: StepShape

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment variables that must be set before accelerate or deepspeed look at them."""
        return {}

    @property
    def capabilities(self) -> BackendInfo:
        return backend_info(self.name)

    def prepare(self, policy: Policy, recipe: Recipe, optim: OptimSpec, shape: StepShape) -> Prepared:
        """Make groups by name, then shard or wrap, then masters, then optimizer, then the schedule on that optimizer.

        Args:
            policy: built in float32, statistics loaded; or on the meta device, with `deferred_weights`.
        """
        assert isinstance(policy, nn.Module)
        self._recipe, self._shape = recipe, shape
        plans = plan_groups(policy, policy.parameter_roles(), optim)
        if not self.fills_shards:
            materialise_policy(policy)
        self.prepared = self._prepare(policy, recipe, optim, plans)
        return self.prepared

    @abstractmethod
    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared: ...

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of forward and backward of one micro-batch; at `boundary` gradients are reduced over ranks."""
        return nullcontext()

    def compute(self) -> AbstractContextManager[Any]:
        """Return the context of forward: autocast, where the recipe computes in another dtype than it stores."""
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
        scale_gradients(gradients, clip_coefficient(norm, self._shape.max_grad_norm))
        self.grad_norm = norm

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum over the ranks that share one copy of the gradients. Replicated gradients are complete on every rank."""
        return value

    def step(self) -> None:
        self.prepared.optimizer.step()

    def zero_grad(self) -> None:
        self.prepared.optimizer.zero_grad(set_to_none=True)

    @property
    def max_grad_norm(self) -> float:
        """The norm that gradients are clipped to."""
        return self._shape.max_grad_norm

    def observe(self) -> Observed:
        """Return what runs, read from the live objects and never from the configuration."""
        return replace(observe(self.prepared.model, self.prepared.optimizer, self.device), settings=self.settings())

    def settings(self) -> dict[str, Setting]:
        """Return the settings in force that can tilt a comparison, read from the live objects. A backend may add its own."""
        return read_settings(self.prepared.model, optimizer_chain(self.prepared.optimizer))

    def mean_over_ranks(self, value: Tensor) -> Tensor:
        """Return the mean of a small float32 tensor over all ranks, computed in place."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value
