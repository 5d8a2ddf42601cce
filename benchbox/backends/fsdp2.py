"""FSDP2, whose parameters are DTensors, and HSDP: FSDP2 on a two-dimensional mesh."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from benchbox.backends.accelerators import device_of, fsdp_accelerator
from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.optimizers import build_optimizer
from benchbox.observer.introspect.names import live_parameters
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec


class Fsdp2(Backend):
    name = "fsdp2"

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[unit.__name__ for unit in policy.layer_units()],
            mixed_precision_policy=_mixed_precision(recipe),
        )
        accelerator = fsdp_accelerator(plugin, self._parallelism(), upcasts=recipe.stepped is None)
        self.device = device_of(accelerator)
        policy.to(device=self.device, dtype=DTYPES[recipe.stepped or recipe.storage])
        for parameter in policy.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[recipe.storage])  # it is never stepped
        # accelerate prepares the two together: it shards the model in place and points the optimizer at the DTensors.
        stepping = build_optimizer(recipe, bind_groups(plans, dict(live_parameters(policy))), optim)
        model, optimizer = accelerator.prepare(policy, stepping)
        return Prepared(model, optimizer, stepping, build_schedule(stepping, optim))

    def _parallelism(self) -> ParallelismConfig | None:
        return None

    def context(self, *, boundary: bool) -> AbstractContextManager[Any]:
        model = self.prepared.model
        return nullcontext() if boundary or not isinstance(model, FSDPModule) else _no_reduction(model)

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        parameter = next(self.prepared.model.parameters())
        if isinstance(parameter, DTensor):
            # The last mesh dimension is the one sharded over; across replicas every copy has the same sum.
            dist.all_reduce(value, group=parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1))
        return value


class Hsdp(Fsdp2):
    """FSDP2 that shards within pairs of ranks and replicates across the pairs."""

    name = "hsdp"

    def _parallelism(self) -> ParallelismConfig:
        # From the launcher: the mesh must be known before the Accelerator that starts the process group.
        return ParallelismConfig(dp_replicate_size=int(os.environ["WORLD_SIZE"]) // 2, dp_shard_size=2)


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
