"""One process, and DDP: every rank holds all parameters, gradients and optimizer state.

During construction it also holds the whole policy in float32. Where there are masters, those tensors become the masters.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchbox.backends.accelerators import ddp_accelerator, device_of, single_accelerator
from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.optimizers import build_master_optimizer, build_optimizer
from benchbox.backends.state import SteppedPart, TrainingState, group_numbers, model_state, optimizer_parts
from benchbox.dcp.shards import element_shards, full_shards
from benchbox.observer.introspect.names import live_parameters
from benchbox.optim import MasterWeightOptimizer, bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from benchbox.dcp.shards import Shards
    from benchbox.optim import GroupPlan
    from benchbox.registry.contracts import Batch
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class _Replicated(Backend):
    """Backend without masters of its own: a recipe that asks for masters gets `MasterWeightOptimizer`."""

    @abstractmethod
    def _accelerator(self) -> Accelerator: ...

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        accelerator = self._accelerator()
        self.device = device_of(accelerator)
        policy.to(self.device)
        # Before the cast: masters must hold what the cast rounds away. It makes new tensors, except of what is float32 already.
        trained = {name for plan in plans for name in plan.names} if recipe.masters else ()
        copies = DTYPES[recipe.storage] == torch.float32
        full = {
            name: parameter.detach().to(torch.float32, copy=copies)
            for name, parameter in live_parameters(policy)
            if name in trained
        }
        policy.to(DTYPES[recipe.storage])
        model = accelerator.prepare_model(policy)
        groups = bind_groups(plans, dict(live_parameters(model)))
        if recipe.masters:
            masters = [full[name] for plan in plans for name in plan.names]
            stepping: Optimizer = build_master_optimizer(recipe, groups, optim, masters)
        else:
            stepping = build_optimizer(recipe, groups, optim)
        optimizer = accelerator.prepare_optimizer(stepping, device_placement=False)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim, plans))

    def _clip(self) -> None:
        if isinstance(self.prepared.stepping, MasterWeightOptimizer):
            self.grad_norm = self.prepared.stepping.clip_grad_norm_(self._shape.max_grad_norm)
        else:
            super()._clip()

    def training_state(self) -> TrainingState:
        model, stepping = self.prepared.model, self.prepared.stepping
        if isinstance(stepping, MasterWeightOptimizer):
            return model_state(model, list(_master_parts(model, stepping)))
        return model_state(model, list(optimizer_parts(model, stepping)))

    def locate_stepped(self, tensors: Mapping[str, Tensor]) -> dict[str, Shards]:
        return {name: full_shards(tensor) for name, tensor in tensors.items()}


def _master_parts(model: nn.Module, optimizer: MasterWeightOptimizer) -> Iterator[SteppedPart]:
    """Yield the masters, of which large ones are stepped in consecutive chunks."""
    names = {id(parameter): name for name, parameter in live_parameters(model)}
    groups, starts = group_numbers(optimizer), dict.fromkeys(names.values(), 0)
    for parameter, master in optimizer.stepped():
        name, shape = names[id(parameter)], tuple(parameter.shape)
        start = starts[name]
        starts[name] += master.numel()
        layout = full_shards if master.shape == parameter.shape else partial(element_shards, shape=shape, start=start)
        yield SteppedPart(name, groups[id(parameter)], master, optimizer.inner.state.get(master, {}), layout)


class Single(_Replicated):
    name = "single"

    def _accelerator(self) -> Accelerator:
        return single_accelerator()


class Ddp(_Replicated):
    name = "ddp"
    drops_frozen_gradients = "DDP reduces the gradients of all parameters that it was built with"

    def _accelerator(self) -> Accelerator:
        return ddp_accelerator()

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        if boundary or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def rehearse(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Take a forward and a backward pass, after the first of which DDP arranges its buckets anew.

        Where more than two ranks add gradients, the place of one in its bucket decides in which order, and so its rounding.
        """
        if not isinstance(self.prepared.model, DistributedDataParallel) or dist.get_world_size() <= 2:
            return batches
        batch = next(batches)
        with self.compute():
            losses = self.prepared.model({name: tensor.to(self.device, copy=True) for name, tensor in batch.items()})
        losses.total.backward()
        self.zero_grad()
        return chain([batch], batches)
