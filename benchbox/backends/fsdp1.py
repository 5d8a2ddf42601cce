"""FSDP1: flat parameters, sharded unit by unit. A flat parameter trains as one, so frozen modules get units of their own.

During construction a rank holds its shards and two copies of the unit that is being wrapped, which FSDP1 concatenates.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from benchbox.backends.accelerators import device_of, fsdp_accelerator, runs
from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.deferred import allocate, materialise_policy, take_deferred_weights
from benchbox.backends.optimizers import build_optimizer
from benchbox.backends.state import TrainingState, model_state, optimizer_parts
from benchbox.dcp.shards import Shards, element_shards, full_shards
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.observer.introspect.wrappers import fsdp1_handles
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from accelerate import Accelerator

    from benchbox.backends.deferred import DeferredWeights
    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class _Fsdp1(Backend):
    strategy: ClassVar[ShardingStrategy]
    fills_shards = True
    takes_scalars = False

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
        sharded = runs(accelerator, DistributedType.FSDP)
        if not sharded:
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
        model = accelerator.prepare_model(self._wrap(policy, accelerator) if sharded else policy)
        for handle in fsdp1_handles(model):
            # Else the first forward would make the parameters views of flat shards that accelerate has upcast. A checkpoint
            # that is restored before would be rounded, and the moments that it needs made in 16 bits.
            handle._use_sharded_views()  # noqa: SLF001 (torch has no public API)
        if weights is not None:
            _fill_shards(model, weights, dtypes)
        stepping = build_optimizer(recipe, bind_groups(plans, dict(live_parameters(model))), optim)
        optimizer = accelerator.prepare_optimizer(stepping, device_placement=False)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim, plans))

    def _wrap(self, policy: nn.Module, accelerator: Accelerator) -> nn.Module:  # noqa: ARG002
        """Return the policy as accelerate gets it: unwrapped, so that accelerate wraps it over all ranks."""
        return policy

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        if boundary or not isinstance(model, FullyShardedDataParallel):
            return nullcontext()
        return model.no_sync()

    def training_state(self) -> TrainingState:
        model = self.prepared.model
        ranges = {parameter: (shape, elements.start) for parameter, shape, elements, _ in _flat_parts(model)}
        sharded = set(_sharded_parameters(model))

        def layout_of(_: str, parameter: nn.Parameter) -> Callable[[Tensor], Shards]:
            if parameter not in sharded:
                return full_shards
            shape, start = ranges.get(parameter, ((0,), 0))  # of one without elements on this rank
            return lambda tensor: element_shards(tensor.detach().flatten(), shape, start)

        parts = [part for part in optimizer_parts(model, self.prepared.stepping, layout_of) if part.tensor.numel()]
        state = model_state(model, parts, layout_of)
        return replace(state, frozen={name: shards for name, shards in state.frozen.items() if shards.boxes})

    def reshard(self) -> None:
        """See `Backend.reshard`. FSDP1 keeps what is outside its inner units gathered until the backward, and has no method."""
        for handle in fsdp1_handles(self.prepared.model):
            if _is_gathered(handle):
                handle.reshard(free_unsharded_flat_param=True)
                handle.post_reshard()
            handle._prefetched = False  # noqa: SLF001

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        if isinstance(self.prepared.model, FullyShardedDataParallel):
            dist.all_reduce(value, group=self.prepared.model.process_group)
        return value


def _is_gathered(handle: Any) -> bool:
    """Return whether a unit holds its gathered parameters, which its next forward would use, even if its views are sharded."""
    gathered = getattr(handle.flat_param, "_full_param_padded", None)  # made by the first forward
    return handle.uses_sharded_strategy and gathered is not None and gathered.untyped_storage().size() > 0


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
    shards = {parameter: (part, slice(elements.start, elements.stop)) for parameter, _, elements, part in _flat_parts(model)}
    parameters = dict(live_parameters(model))
    buffers = dict(live_buffers(model))

    def write(name: str, full: Tensor) -> None:
        if name in buffers:
            buffers[name].copy_(full)
        elif parameters[name] in shards:
            part, elements = shards[parameters[name]]
            part.copy_(full.flatten()[elements].to(dtypes[name]))

    weights.materialise(write)


def _flat_parts(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[int, ...], range, Tensor]]:
    """Yield the parameters with elements on this rank: (parameter, shape, range of elements, their part of the flat shard)."""
    for handle in fsdp1_handles(model):
        flat = handle.flat_param
        infos = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)  # noqa: SLF001 (torch has no public API)
        for parameter, shape, info in infos:
            if info.in_shard:
                part = flat.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
                yield parameter, tuple(shape), range(info.intra_param_start_idx, info.intra_param_end_idx + 1), part


def _sharded_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for handle in fsdp1_handles(model):
        yield from handle.flat_param._params  # noqa: SLF001


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


class _Fsdp1Hybrid(_Fsdp1):
    """FSDP1 that shards within groups of neighbouring ranks and replicates across the groups."""

    def _wrap(self, policy: nn.Module, accelerator: Accelerator) -> nn.Module:
        # accelerate's plugin cannot name the groups, and torch would take all devices of a node for one.
        size, plugin = self._shape.shard_size, accelerator.state.fsdp_plugin
        names = ("replicate", "shard")
        mesh = init_device_mesh(self.device.type, (dist.get_world_size() // size, size), mesh_dim_names=names)
        return FullyShardedDataParallel(
            policy,
            process_group=(mesh.get_group("shard"), mesh.get_group("replicate")),
            sharding_strategy=self.strategy,
            auto_wrap_policy=plugin.auto_wrap_policy,
            mixed_precision=plugin.mixed_precision_policy,
            backward_prefetch=plugin.backward_prefetch,
            forward_prefetch=plugin.forward_prefetch,
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=plugin.use_orig_params,
            param_init_fn=plugin.param_init_fn,
            device_id=self.device,
        )


class Fsdp1Hybrid(_Fsdp1Hybrid):
    name = "fsdp1_hybrid"
    strategy = ShardingStrategy.HYBRID_SHARD


class Fsdp1HybridGradOp(_Fsdp1Hybrid):
    name = "fsdp1_hybrid_grad_op"
    strategy = ShardingStrategy._HYBRID_SHARD_ZERO2  # noqa: SLF001 (torch exports no public name)
