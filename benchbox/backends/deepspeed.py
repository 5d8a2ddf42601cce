"""DeepSpeed ZeRO 1, 2 and 3.

ZeRO-1 and ZeRO-2 replicate the parameters: every rank builds the whole policy in float32 and keeps it until the masters are
set, beside the copy that DeepSpeed casts. ZeRO-3 partitions the policy module by module, so that a rank holds its partitions
and one module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.deferred import allocate, materialise_policy, take_deferred_weights
from benchbox.backends.optimizers import build_optimizer
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from benchbox.backends.deferred import DeferredWeights
    from benchbox.optim import GroupPlan
    from benchbox.registry.recipes import Recipe
    from benchbox.spec.cell import OptimSpec

# DeepSpeed's own defaults, in elements
_DEFAULT_BUCKET = 500_000_000  # of reduce and gather buckets
_DEFAULT_PREFETCH_BUCKET = 50_000_000  # of ZeRO-3


class _Zero(Backend):
    """ZeRO under accelerate's engine.

    accelerate's engine wrapper steps inside `backward`; here backward and step are called one by one, so that each has its own
    time. Clipping stays inside DeepSpeed's optimizer step, as `fused_phases` declares.
    """

    stage: ClassVar[int]
    fused_phases: ClassVar[dict[str, str]] = {"clip": "DeepSpeed clips inside its optimizer step: see optimizer"}

    @staticmethod
    def environment() -> dict[str, str]:
        variables = {"ACCELERATE_USE_DEEPSPEED": "true"}
        if not torch.cuda.is_available():
            variables["DS_ACCELERATOR"] = "cpu"
        return variables

    def _prepare(self, policy: Any, recipe: Recipe, optim: OptimSpec, plans: list[GroupPlan]) -> Prepared:
        from accelerate.utils import DeepSpeedPlugin, DistributedType

        from benchbox.backends.accelerators import deepspeed_accelerator, device_of, runs

        if not torch.cuda.is_available():
            from benchbox.backends.extension import build_extension

            build_extension(self.enter_stage)
        numel = sum(parameter.numel() for parameter in policy.parameters())
        plugin = DeepSpeedPlugin(hf_ds_config=self._config(recipe, numel))
        accelerator = deepspeed_accelerator(plugin, self._shape.accumulation)
        self.device = device_of(accelerator)
        if not runs(accelerator, DistributedType.DEEPSPEED):
            materialise_policy(policy)
        weights = take_deferred_weights(policy)
        if weights is None:
            # Before DeepSpeed casts the policy: masters must hold what the cast rounds away. It makes new tensors, so these
            # stay as they are.
            trained = [parameter for parameter in policy.parameters() if parameter.requires_grad] if recipe.masters else []
            values = {parameter: parameter.detach() for parameter in trained}
            if self.stage == 3:
                values = {key: _partition(value, -(-value.numel() // dist.get_world_size())) for key, value in values.items()}
            policy.to(self.device)
        else:
            policy.to(DTYPES[recipe.storage])
            _partition_parameters(policy, weights.device, plugin.deepspeed_config)
            values = _fill_partitions(policy, weights, masters=recipe.masters)
        basic = build_optimizer(recipe, bind_groups(plans, dict(live_parameters(policy))), optim)
        engine, optimizer = accelerator.prepare(policy, basic)
        _set_masters(values)
        self._engine = engine
        # DeepSpeed replaces the tensors in the groups of this same AdamW by its partitions, and steps it.
        return Prepared(engine, optimizer, basic, build_schedule(basic, optim))

    def _config(self, recipe: Recipe, numel: int) -> dict[str, Any]:
        # A bucket is allocated whole, so one larger than the model only wastes memory. DeepSpeed wants an even number.
        bucket = min(_DEFAULT_BUCKET, numel + numel % 2)
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": bucket}
        if self.stage == 3:
            # By default parameters under 1e5 elements stay whole and 5e7 are prefetched: in a small policy, all. Prefetching
            # keeps its default share of the reduce bucket.
            zero |= {
                "stage3_param_persistence_threshold": min(100_000, numel // 1000),
                "stage3_prefetch_bucket_size": bucket * _DEFAULT_PREFETCH_BUCKET // _DEFAULT_BUCKET,
            }
        else:
            zero |= {"allgather_bucket_size": bucket}
        pure = recipe.stepped == "bfloat16"
        config: dict[str, Any] = {
            "zero_optimization": zero,
            "gradient_clipping": self._shape.max_grad_norm,
            "train_micro_batch_size_per_gpu": self._shape.batch,
            "gradient_accumulation_steps": self._shape.accumulation,
            "bf16": {
                "enabled": recipe.storage == "bfloat16",
                "bf16_master_weights_and_grads": pure,
                "bf16_optimizer_states": pure,
            },
            "fp16": {"enabled": False},
            "steps_per_print": 2**31,
            "wall_clock_breakdown": False,
        }
        if recipe.storage != recipe.compute:
            # No module is "lower precision safe": those would have their gradients reduced in bfloat16, unlike everywhere else.
            config["torch_autocast"] = {
                "enabled": True,
                "dtype": recipe.compute,
                "lower_precision_safe_modules": [],
            }
        return config

    def backward(self, loss: Tensor, *, boundary: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=boundary)
        self._engine.backward(loss)  # divides by the accumulation itself

    def clip(self) -> None:
        """Do nothing: DeepSpeed clips in its step, see `fused_phases`."""

    def step(self) -> None:
        """Clip, step the partitions, gather the updated parameters."""
        self._engine.step()
        self.grad_norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def zero_grad(self) -> None:
        """Do nothing: DeepSpeed clears gradients in its step."""


def _partition_parameters(policy: nn.Module, device: torch.device, config: dict[str, Any]) -> None:
    """Partition a policy on the meta device for ZeRO-3. Each module has whole parameters, uninitialised, until it is done."""
    from deepspeed.runtime.zero import Init

    converted: Any = None
    replacements: dict[Tensor, Tensor] = {}
    for module in policy.modules():
        allocate([module], device, replacements)
        parameters = list(module.parameters(recurse=False))
        if converted is not None:
            converted.convert_to_zero_parameters(param_list=parameters)
        elif parameters:
            Init(nn.ParameterList(parameters), config_dict_or_path=config)
            converted = parameters[0]


def _fill_partitions(policy: nn.Module, weights: DeferredWeights, *, masters: bool) -> dict[nn.Parameter, Tensor]:
    """Compute the values of partitioned parameters, one whole tensor at a time.

    Returns:
        With `masters` this rank's partitions of what trains, in float32; else nothing.
    """
    parameters, buffers = dict(live_parameters(policy)), dict(live_buffers(policy))
    partitions: dict[nn.Parameter, Tensor] = {}

    def write(name: str, full: Tensor) -> None:
        if name in buffers:
            buffers[name].copy_(full)
            return
        parameter: Any = parameters[name]
        partition = _partition(full, parameter.ds_tensor.numel())
        parameter.ds_tensor.copy_(partition)
        if masters and parameter.requires_grad:
            partitions[parameter] = partition.clone()  # else a view would keep the whole tensor

    weights.materialise(write)
    return partitions


def _partition(full: Tensor, size: int) -> Tensor:
    """Return this rank's partition of a tensor, of `size` elements. The last one may have padding."""
    partition = full.flatten()[dist.get_rank() * size :][:size]
    return nn.functional.pad(partition, (0, size - partition.numel()))


def _set_masters(values: dict[nn.Parameter, Tensor]) -> None:
    """Copy float32 values into the masters that this rank holds of the parameters.

    DeepSpeed makes masters from the live parameters, which it has cast to the storage dtype by then. Backends would then start
    one recipe from different weights.

    Args:
        values: whole tensors, under ZeRO-3 this rank's partitions.
    """
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    for parameter, value in values.items():
        if hasattr(parameter, "ds_tensor"):  # ZeRO-3 cannot set whole parameters whose partitions have padding
            safe_set_local_fp32_param(parameter, value)
        else:
            safe_set_full_fp32_param(parameter, value)


class Zero1(_Zero):
    name = "zero1"
    stage = 1


class Zero2(_Zero):
    name = "zero2"
    stage = 2


class Zero3(_Zero):
    name = "zero3"
    fills_shards = True
    stage = 3
