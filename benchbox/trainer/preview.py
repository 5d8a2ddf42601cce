"""A training before it starts: its parameter groups with counts and bytes, its data, and its schedule. No rank is started."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from benchbox.data.samples.training_texts import check_targets, describe_unseen_data
from benchbox.errors import UnsupportedError
from benchbox.observer.introspect.names import live_parameters
from benchbox.optim import freeze, plan_groups, rate_factor
from benchbox.registry.backends import backend_info
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.recipes import STATES_PER_ELEMENT, recipe_by_name
from benchbox.registry.refusals import cell_refusal
from benchbox.session.build import build_cell_policy, open_cell_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.optim import GroupPlan
    from benchbox.registry.contracts import Policy
    from benchbox.registry.launch_record import DatasetRecord
    from benchbox.spec.cell import Cell
    from benchbox.spec.train import TrainConfig

_SIZES = {"float32": 4, "bfloat16": 2}
_MOMENTS = 2  # of an optimizer that is not ours, per element: those of AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPreview:
    """A parameter group: its plan, its counts, and the learning rate of every step.

    Bytes are of whole tensors, one copy of each: sharding divides them by ranks, replication multiplies them. Those of moments
    are of everything that the optimizer keeps for each element.
    """

    plan: GroupPlan
    tensors: int
    elements: int
    weights_bytes: int
    masters_bytes: int
    moments_bytes: int
    averages_bytes: int
    rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPreview:
    """A training as its file describes it, after everything was checked that can be checked without ranks.

    `datasets` is empty where samples are generated; `warnings` are lines on what the policy cannot read of them.
    """

    groups: tuple[GroupPreview, ...]
    frozen_elements: int
    datasets: tuple[DatasetRecord, ...]
    warnings: tuple[str, ...]


def preview_training(config: TrainConfig, policy_dirs: Sequence[Path]) -> TrainingPreview:
    """Build the policy on the meta device, plan its groups, and read one sample of the data.

    Raises:
        ConfigurationError: the policy, a parameter group or the data cannot be what the configuration says.
        DataError: the dataset is missing or damaged.
        UnsupportedError: the backend, the device or the policy does not support the cell.
    """
    cell = config.cell
    refusal = cell_refusal(cell)
    if refusal is not None:
        raise UnsupportedError(refusal)
    policy = build_cell_policy(cell, policy_dirs)
    assert isinstance(policy, nn.Module)
    if cell.weights is not None and not hasattr(policy, "load_weights"):
        raise UnsupportedError(f"{type(policy).__name__} reads no published weights")
    freeze(policy, policy.parameter_roles(), FREEZE_PRESETS[cell.freeze])
    parameters = dict(live_parameters(policy))
    plans = plan_groups(policy, policy.parameter_roles(), cell.optim)
    groups = tuple(_preview_group(plan, parameters, config) for plan in plans)
    frozen = sum(parameter.numel() for parameter in parameters.values() if not parameter.requires_grad)
    datasets, warnings = _read_datasets(cell, policy)
    return TrainingPreview(groups=groups, frozen_elements=frozen, datasets=datasets, warnings=warnings)


def _preview_group(plan: GroupPlan, parameters: dict[str, nn.Parameter], config: TrainConfig) -> GroupPreview:
    cell, recipe = config.cell, recipe_by_name(config.cell.recipe)
    elements = sum(parameters[name].numel() for name in plan.names)
    keeps_masters = recipe.masters or (recipe.stepped is None and backend_info(cell.backend).shards_optimizer)
    stepped = "float32" if keeps_masters else recipe.storage
    factor = rate_factor(cell.optim, plan.lr, plan.freeze_steps)
    return GroupPreview(
        plan=plan,
        tensors=len(plan.names),
        elements=elements,
        weights_bytes=elements * _SIZES[recipe.storage],
        masters_bytes=elements * _SIZES["float32"] if keeps_masters else 0,
        moments_bytes=elements * STATES_PER_ELEMENT.get(recipe.optimizer, _MOMENTS) * _SIZES[stepped],
        averages_bytes=elements * _SIZES["float32"] if cell.optim.ema_decay is not None else 0,
        rates=tuple(plan.lr * factor(step) for step in range(config.steps)),
    )


def _read_datasets(cell: Cell, policy: Policy) -> tuple[tuple[DatasetRecord, ...], tuple[str, ...]]:
    """Return what is trained on of each dataset, and warnings. One sample is read, in the form that the policy needs.

    It stays on the host: a training that runs may have taken all memory of the GPU.
    """
    single = replace(cell, batch=1, accumulation=1, data=replace(cell.data, workers=0))
    with closing(open_cell_data(single, policy, rank=0, on_host=True)) as stream:
        check_targets(stream.samples, stream.spec)
        next(stream)
        return tuple(stream.data_use.record()["datasets"]), tuple(describe_unseen_data(stream.samples))
