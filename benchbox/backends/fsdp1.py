"""FSDP1: flat parameters, sharded unit by unit. A flat parameter trains as one, so frozen modules get units of their own.

During construction a rank holds its shards and two copies of the unit that is being wrapped, which FSDP1 concatenates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from benchbox.backends.accelerators import device_of, fsdp_accelerator, runs
from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.deferred import allocate, materialise_policy, take_deferred_weights
from benchbox.backends.optimizers import build_optimizer
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.observer.introspect.wrappers import fsdp1_handles
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from benchbox.backends.deferred import DeferredWeights
    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class _Fsdp1(Backend):
    strategy: ClassVar[ShardingStrategy]
    fills_shards = True

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        units = sharded_modules(policy, policy.layer_units())
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=self.strategy.name,
            auto_wrap_policy=CustomPolicy(units.__contains__),
            use_orig_params=True,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,  # torch's default; accelerate's is none
            mixed_precision_policy=_mixed_precision(recipe),
        )
        accelerator = fsdp_accelerator(plugin, upcasts=recipe.stepped is None)
        self.device = device_of(accelerator)
        if not runs(accelerator, DistributedType.FSDP):
            materialise_policy(policy)
        weights = take_deferred_weights(policy)
        if weights is not None:  # a unit has memory of its own only until it is sharded
            replacements: dict[Tensor, Tensor] = {}
            accelerator.state.fsdp_plugin.param_init_fn = lambda module: allocate([module], weights.device, replacements)
        # The shards keep the dtype wrapped here. Casting float32 weights before wrapping is what put Adam's state in bfloat16,
        # unless accelerate is configured for mixed precision and upcasts them, as for a recipe that leaves masters to it.
        policy.to(device=None if weights else self.device, dtype=DTYPES[recipe.stepped or recipe.storage])
        for module in units:
            if is_frozen(module):
                module.to(DTYPES[recipe.storage])  # it is never stepped
        dtypes = {name: parameter.dtype for name, parameter in live_parameters(policy)}
        model = accelerator.prepare_model(policy)
        if weights is not None:
            _fill_shards(model, weights, dtypes)
        stepping = build_optimizer(recipe, bind_groups(plans, dict(live_parameters(model))), optim)
        optimizer = accelerator.prepare_optimizer(stepping, device_placement=False)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim))

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        if boundary or not isinstance(model, FullyShardedDataParallel):
            return nullcontext()
        return model.no_sync()

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        if isinstance(self.prepared.model, FullyShardedDataParallel):
            dist.all_reduce(value, group=self.prepared.model.process_group)
        return value


def sharded_modules(policy: nn.Module, layers: tuple[type[nn.Module], ...]) -> set[nn.Module]:
    """Return the modules to shard at: layers, and frozen modules next to trained ones.

    In a flat parameter of both, autograd computes gradients of all its elements. So each module that directly has frozen
    parameters is sharded by itself: such a module is certainly called, which a larger one around it may not be.
    """
    units = set()

    def visit(module: nn.Module, *, mixed: bool) -> None:
        """Collect the units within a module; `mixed` is whether something trains in the unit that it would be in."""
        if isinstance(module, layers):
            units.add(module)
            mixed = not is_frozen(module)
        elif mixed and is_frozen(module) and any(True for _ in module.parameters(recurse=False)):
            units.add(module)
            mixed = False
        for child in module.children():
            visit(child, mixed=mixed)

    visit(policy, mixed=True)
    return units


def is_frozen(module: nn.Module) -> bool:
    """Return whether the module has parameters and none of them trains."""
    return {parameter.requires_grad for parameter in module.parameters()} == {False}


def _fill_shards(model: nn.Module, weights: DeferredWeights, dtypes: Mapping[str, torch.dtype]) -> None:
    """Compute the values of a sharded model one whole tensor at a time, and keep those of this rank's flat shards.

    Args:
        dtypes: of the parameters before they were sharded, to which their values are rounded.
    """
    shards = {}  # parameter -> (its part of the flat shard, the range of elements of the parameter that it contains)
    for handle in fsdp1_handles(model):
        flat = handle.flat_param
        for parameter, info in zip(flat._params, flat._shard_param_infos, strict=True):  # noqa: SLF001 (torch has no public API)
            if info.in_shard:
                part = flat.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                shards[parameter] = part, slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
    parameters = dict(live_parameters(model))
    buffers = dict(live_buffers(model))

    def write(name: str, full: Tensor) -> None:
        if name in buffers:
            buffers[name].copy_(full)
        elif parameters[name] in shards:
            part, elements = shards[parameters[name]]
            value = full.flatten()[elements].to(dtypes[name])
            part.copy_(value)
            # A view of the flat shard, unless accelerate has upcast that: then the first forward copies this into it.
            parameters[name].detach().view(-1).copy_(value)

    weights.materialise(write)


def _mixed_precision(recipe: Recipe) -> MixedPrecision | None:
    """Return the policy of FSDP1: shards in one dtype, gathered and reduced in another.

    Inputs are not cast: the policy casts them where they enter a matrix product, and noise, times and normalisation statistics
    must stay float32.
    """
    if recipe.storage == recipe.stepped:
        return None
    dtype = DTYPES[recipe.storage]
    return MixedPrecision(
        param_dtype=dtype,
        reduce_dtype=dtype,
        buffer_dtype=None,
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


class Fsdp1Full(_Fsdp1):
    name = "fsdp1_full"
    strategy = ShardingStrategy.FULL_SHARD


class Fsdp1GradOp(_Fsdp1):
    name = "fsdp1_grad_op"
    strategy = ShardingStrategy.SHARD_GRAD_OP
