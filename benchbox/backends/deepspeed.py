"""DeepSpeed ZeRO 1, 2 and 3.

ZeRO-1 and ZeRO-2 replicate the parameters: every rank builds the whole policy in float32 and keeps it until the masters are
set, beside the copy that DeepSpeed casts. ZeRO-3 partitions the policy module by module, so that a rank holds its partitions
and one module.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchbox.backends.base import DTYPES, Backend, Prepared
from benchbox.backends.deferred import allocate, materialise_policy, take_deferred_weights
from benchbox.backends.optimizers import build_optimizer
from benchbox.backends.state import SteppedPart, TrainingState, create_optimizer_state, model_state
from benchbox.dcp.shards import Shards, element_shards, full_shards
from benchbox.observer.introspect.names import live_buffers, live_parameters
from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim import bind_groups, build_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch.optim import Optimizer

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
    takes_scalars = False
    drops_frozen_gradients = "DeepSpeed reduces the gradients of all parameters that its partitions were built of"

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
        self._engine: Any = engine
        self._excluded: list[dict[str, Any]] = []
        self._links_moments = not optim.freeze_backbone_steps
        if optim.freeze_backbone_steps or optim.spike is not None:
            basic.register_step_pre_hook(self._drop_gradients)
        # DeepSpeed replaces the tensors in the groups of this same AdamW by its partitions, and steps it.
        return Prepared(engine, optimizer, basic, build_schedule(basic, optim, plans))

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
        frozen = self._frozen_groups()
        self._clear_gradients(frozen)
        self._step_without(frozen)
        self.grad_norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32, device=self.device)

    def skip_step(self) -> None:
        """Take DeepSpeed's step, which clears its gradients and counters, without a gradient for any group."""
        self.grad_norm = self._norm_before_step()
        self._step_without(set(range(len(self._plans))))

    def _step_without(self, groups: set[int]) -> None:
        self._excluded = [self.prepared.stepping.param_groups[index] for index in groups]
        if self.stage < 3 and not self._links_moments:
            # DeepSpeed looks up the moments of all groups after its first step. A group that was frozen then has none yet.
            self._zero_optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
            self._links_moments = not groups
        self._engine.step()

    def _norm_before_step(self) -> Tensor:
        self._clear_gradients(self._frozen_groups())
        groups = self._zero_optimizer.fp16_groups if self.stage == 3 else self._zero_optimizer.params_in_partition
        gradients = self._zero_optimizer.averaged_gradients
        norms = [self._zero_optimizer.get_grad_norm_direct(gradients[index], group) for index, group in enumerate(groups)]
        stacked = torch.stack([torch.as_tensor(norm, dtype=torch.float32, device=self.device) for norm in norms])
        is_finite = (stacked.isfinite() & (stacked >= 0)).all()  # DeepSpeed's number for a norm that is not finite is -1
        return torch.where(is_finite, torch.linalg.vector_norm(stacked), torch.inf)

    def _frozen_groups(self) -> set[int]:
        step = self.prepared.schedule.step_count
        return {index for index, plan in enumerate(self._plans) if step < plan.freeze_steps}

    def _clear_gradients(self, groups: set[int]) -> None:
        """Set the reduced gradients of these groups to zero, so that they have no part in the norm."""
        group_indices = self._zero_optimizer.sub_group_to_group_id if self.stage == 3 else {}
        for index, gradients in self._zero_optimizer.averaged_gradients.items() if groups else ():
            if group_indices.get(index, index) in groups:
                for gradient in gradients or ():
                    gradient.zero_()

    def _drop_gradients(self, basic: Optimizer, *_: Any) -> None:
        """Remove the gradients of the excluded groups, so that their partitions are not stepped, decayed or given moments."""
        excluded = set(map(id, self._excluded))
        for group in basic.param_groups:
            if id(group) in excluded:
                for partition in group["params"]:
                    partition.grad = None

    def stepped_tensors(self) -> dict[str, Tensor]:
        names = {name for plan in self._plans for name in plan.names}
        parameters = {name: parameter for name, parameter in live_parameters(self.prepared.model) if name in names}
        if self.stage == 3:
            return {
                name: self._zero_optimizer.get_local_fp32_param(parameter).detach() for name, parameter in parameters.items()
            }
        mappings = {name: getattr(parameter, "_hp_mapping", None) for name, parameter in parameters.items()}
        return {name: mapping.hp_fragment.detach() for name, mapping in mappings.items() if mapping is not None}

    def zero_grad(self) -> None:
        """Do nothing: DeepSpeed clears gradients in its step."""

    @property
    def _zero_optimizer(self) -> Any:
        return self._engine.optimizer

    def _partitions(self) -> list[tuple[Tensor, int, list[Any]]]:
        """Return the flat tensors that DeepSpeed steps: (tensor, number of its parameter group, parameters)."""
        zero = self._zero_optimizer
        return [
            (*pair, zero.bit16_groups[pair[1]]) for pair in zip(zero.single_partition_of_fp32_groups, count(), strict=False)
        ]

    def training_state(self) -> TrainingState:
        model, optimizer = self.prepared.model, self.prepared.stepping
        names = {id(parameter): name for name, parameter in live_parameters(model)}
        parts = [
            SteppedPart(names[id(parameter)], group, flat, optimizer.state.get(flat, {}), layout)
            for flat, group, parameters in self._partitions()
            for parameter in parameters
            if (layout := self._layout(parameter)) is not None
        ]
        return model_state(model, parts, _frozen_layout)

    def _layout(self, parameter: Any) -> Callable[[Tensor], Shards] | None:
        """Return where this rank's elements of a parameter are in a partition, None where it has none."""
        mapping = parameter._hp_mapping  # noqa: SLF001 (DeepSpeed's functions give copies over all ranks)
        if mapping is None:
            return None
        source, target = mapping.hp_fragment_address, mapping.lp_fragment_address
        shape = tuple(parameter.shape)
        return lambda flat: element_shards(flat.detach()[source.start : source.start + source.numel], shape, target.start)

    def locate_stepped(self, tensors: Mapping[str, Tensor]) -> dict[str, Shards]:
        return {
            name: self._locate(parameter, tensors[name])
            for name, parameter in live_parameters(self.prepared.model)
            if name in tensors
        }

    def _locate(self, parameter: Any, elements: Tensor) -> Shards:
        return element_shards(elements, tuple(parameter.shape), parameter._hp_mapping.lp_fragment_address.start)  # noqa: SLF001

    def create_optimizer_state(self, names: Collection[str]) -> None:
        model, optimizer = self.prepared.model, self.prepared.stepping
        wanted = {id(parameter) for name, parameter in live_parameters(model) if name in names}
        groups = [group["params"] for group in optimizer.param_groups]
        for flat, index, parameters in self._partitions():
            if any(id(parameter) in wanted for parameter in parameters):
                for number, group in enumerate(optimizer.param_groups):
                    group["params"] = [flat] if number == index else []
                create_optimizer_state(optimizer, [flat])
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = tensors

    def refresh_live(self) -> None:
        self._zero_optimizer.update_lp_params()


def _frozen_layout(_: str, parameter: Any) -> Callable[[Tensor], Shards]:
    if not hasattr(parameter, "ds_tensor"):
        return full_shards
    start, size = _partition_range(parameter)
    return lambda tensor: element_shards(local_shard(tensor)[:size], tuple(parameter.ds_shape), start)


def _partition_range(parameter: Any) -> tuple[int, int]:
    """Return the first element of this rank's partition under ZeRO-3, and the number of elements without padding."""
    size = parameter.ds_tensor.numel()
    start = min(dist.get_rank() * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


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

    def _partitions(self) -> list[tuple[Tensor, int, list[Any]]]:
        zero = self._zero_optimizer
        flats = enumerate(zero.fp32_partitioned_groups_flat)
        return [(flat, zero.sub_group_to_group_id[index], zero.fp16_groups[index]) for index, flat in flats]

    def _layout(self, parameter: Any) -> Callable[[Tensor], Shards] | None:
        _, offset, _ = self._zero_optimizer.grad_position[self._zero_optimizer.get_param_id(parameter)]
        start, size = _partition_range(parameter)
        shape = tuple(parameter.ds_shape)
        return lambda flat: element_shards(flat.detach()[offset : offset + size], shape, start)

    def _locate(self, parameter: Any, elements: Tensor) -> Shards:
        start, size = _partition_range(parameter)
        return element_shards(elements[:size], tuple(parameter.ds_shape), start)

    def refresh_live(self) -> None:
        zero = self._zero_optimizer
        zero._partition_all_parameters()  # noqa: SLF001 (as its step does around its update)
        for index in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(index)  # noqa: SLF001
        persistent = zero.persistent_parameters
        if len(persistent) > 0:  # kept whole on every rank
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
