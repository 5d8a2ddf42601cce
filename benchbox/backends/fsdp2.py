"""FSDP2, whose parameters are DTensors, and HSDP: FSDP2 on a two-dimensional mesh.

During construction a rank holds its shards and the tensors of the layer whose weights are being computed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from benchbox.backends.accelerators import device_of, fsdp_accelerator, runs
from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.deferred import materialise_policy, take_deferred_weights
from benchbox.backends.optimizers import build_optimizer
from benchbox.backends.state import TrainingState, model_state, optimizer_parts
from benchbox.dcp.shards import Shards, full_shards, row_shards
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchbox.backends.deferred import DeferredWeights
    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class Fsdp2(Backend):
    name = "fsdp2"
    fills_shards = True
    takes_scalars = False

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=_layer_class_names(policy),
            mixed_precision_policy=_mixed_precision(recipe),
        )
        accelerator = fsdp_accelerator(plugin, self._parallelism(), upcasts=recipe.stepped is None)
        self.device = device_of(accelerator)
        sharded = runs(accelerator, DistributedType.FSDP)
        if not sharded:
            materialise_policy(policy)
        weights = take_deferred_weights(policy)
        policy.to(device=None if weights else self.device, dtype=DTYPES[recipe.stepped or recipe.storage])
        for parameter in policy.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[recipe.storage])  # it is never stepped
        dtypes = {name: parameter.dtype for name, parameter in live_parameters(policy)}
        # `accelerator.prepare` would find the optimizer's parameters by their addresses, and meta tensors have none.
        model = fsdp2_prepare_model(accelerator, policy) if sharded else accelerator.prepare_model(policy)
        if weights is not None:
            _fill_shards(model, weights, dtypes)
        if sharded and optim.freeze_backbone_steps:
            # FSDP2 reads the dtypes of gradients when it initialises itself, by default in the first forward pass, and finds
            # none in a unit that is frozen then.
            model._get_fsdp_state()._lazy_init()  # noqa: SLF001 (torch has no public function)
        stepping = build_optimizer(recipe, bind_groups(plans, dict(live_parameters(model))), optim)
        optimizer = accelerator.prepare_optimizer(stepping, device_placement=False)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim, plans))

    def _parallelism(self) -> ParallelismConfig | None:
        return None

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        return nullcontext() if boundary or not isinstance(model, FSDPModule) else _no_reduction(model)

    def reshard(self) -> None:
        """See `Backend.reshard`. FSDP2 keeps its outermost unit gathered until the backward."""
        for module in self.prepared.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        parameter = next(self.prepared.model.parameters())
        if isinstance(parameter, DTensor):
            # The last mesh dimension is the one sharded over; across replicas every copy has the same sum.
            dist.all_reduce(value, group=parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1))
        return value

    def training_state(self) -> TrainingState:
        model = self.prepared.model
        self.reshard()
        return model_state(model, list(optimizer_parts(model, self.prepared.stepping, _layout_of)), _layout_of)

    def mesh(self) -> list[int]:
        parameter = next(self.prepared.model.parameters())
        return list(parameter.device_mesh.shape) if isinstance(parameter, DTensor) else super().mesh()


def _layout_of(_: str, parameter: nn.Parameter) -> Callable[[Tensor], Shards]:
    """Return the layout of tensors that are sharded like a parameter."""
    if not isinstance(parameter, DTensor):
        return full_shards
    shape, start = tuple(parameter.shape), _row_range(parameter).start
    return lambda tensor: row_shards(local_shard(tensor.detach()), shape, start)


class Hsdp(Fsdp2):
    """FSDP2 that shards within groups of ranks and replicates across the groups."""

    name = "hsdp"

    def _parallelism(self) -> ParallelismConfig:
        # From the launcher: the mesh must be known before the Accelerator that starts the process group.
        size = self._shape.shard_size
        return ParallelismConfig(dp_replicate_size=int(os.environ["WORLD_SIZE"]) // size, dp_shard_size=size)


def _fill_shards(model: nn.Module, weights: DeferredWeights, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give a model that was sharded on the meta device its shards, and compute their values one whole tensor at a time.

    Args:
        dtypes: of the parameters before they were sharded, to which their values are rounded.
    """
    model.to_empty(device=weights.device)
    tensors = dict(live_parameters(model)) | dict(live_buffers(model))

    def write(name: str, full: Tensor) -> None:
        tensor = tensors[name].detach()
        value = _local_rows(full, tensor) if isinstance(tensor, DTensor) else full
        local_shard(tensor).copy_(value.to(dtypes.get(name, tensor.dtype)))

    weights.materialise(write)


def _local_rows(full: Tensor, sharded: DTensor) -> Tensor:
    """Return the rows of a whole tensor that this rank stores of a tensor sharded alike. FSDP2 splits as `torch.chunk` does."""
    rows = _row_range(sharded)
    return full[rows.start : rows.stop]


def _row_range(sharded: DTensor) -> range:
    """Return the numbers of the rows that this rank stores."""
    mesh, total = sharded.device_mesh, sharded.shape[0]
    rows = -(-total // mesh.size(mesh.ndim - 1))  # the last mesh dimension is the one sharded over
    start = min(rows * mesh.get_local_rank(mesh.ndim - 1), total)
    return range(start, min(start + rows, total))


def _layer_class_names(policy: Any) -> list[str]:
    """Return the names of the classes to shard at. accelerate looks for them inside the wrappers of checkpointed layers."""
    layers = [module for module in policy.modules() if isinstance(module, policy.layer_units())]
    return sorted({type(getattr(layer, "_checkpoint_wrapped_module", layer)).__name__ for layer in layers})


@contextmanager
def _no_reduction(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _mixed_precision(recipe: Recipe) -> MixedPrecisionPolicy:
    """Return the policy of FSDP2, as for FSDP1: shards in the stepped dtype, gathered and reduced in the storage dtype."""
    if recipe.storage == recipe.stepped:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    dtype = DTYPES[recipe.storage]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
