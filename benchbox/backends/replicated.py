"""One process, and DDP: every rank holds everything."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchbox.backends.accelerators import ddp_accelerator, device_of, single_accelerator
from benchbox.backends.base import DTYPES, Backend, Prepared, adamw, adamw_arguments
from benchbox.observer.introspect.names import live_parameters
from benchbox.optim import MasterWeightOptimizer, bind_groups, build_schedule

if TYPE_CHECKING:
    from accelerate import Accelerator

    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class _Replicated(Backend):
    """Keeps no masters of its own, so a recipe that asks for masters gets `MasterWeightOptimizer`."""

    @abstractmethod
    def _accelerator(self) -> Accelerator: ...

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        accelerator = self._accelerator()
        self.device = device_of(accelerator)
        policy.to(self.device)
        # Before the cast: what the cast rounds away is just what masters are for.
        trained = {name for plan in plans for name in plan.names} if recipe.masters else ()
        full = {name: parameter.detach().clone() for name, parameter in policy.named_parameters() if name in trained}
        policy.to(DTYPES[recipe.storage])
        model = accelerator.prepare_model(policy)
        groups = bind_groups(plans, dict(live_parameters(model)))
        if recipe.masters:
            masters = [full[name] for plan in plans for name in plan.names]
            stepping: torch.optim.Optimizer = MasterWeightOptimizer(
                groups, torch.optim.AdamW, masters=masters, **adamw_arguments(optim), fused=True
            )
        else:
            stepping = adamw(groups, optim, recipe)
        optimizer = accelerator.prepare_optimizer(stepping, device_placement=False)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim))

    def clip(self) -> None:
        if isinstance(self.prepared.stepping, MasterWeightOptimizer):
            self.grad_norm = self.prepared.stepping.clip_grad_norm_(self._shape.max_grad_norm)
        else:
            super().clip()


class Single(_Replicated):
    name = "single"

    def _accelerator(self) -> Accelerator:
        return single_accelerator()


class Ddp(_Replicated):
    name = "ddp"

    def _accelerator(self) -> Accelerator:
        return ddp_accelerator()

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        if boundary or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()
