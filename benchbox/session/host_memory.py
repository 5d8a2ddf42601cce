"""Memory of the machine against what the weights and optimizer state of CPU ranks take at least."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from torch import nn

from benchbox.backends.base import DTYPES
from benchbox.backends.device import rank_device
from benchbox.errors import UnsupportedError
from benchbox.measure.control_groups import usable_memory_bytes
from benchbox.registry.backends import backend_info
from benchbox.registry.recipes import STATES_PER_ELEMENT, recipe_by_name

if TYPE_CHECKING:
    from benchbox.registry.contracts import Policy
    from benchbox.spec.cell import Cell


def check_host_memory(cell: Cell, policy: Policy, ranks: int | None = None) -> None:
    """Refuse a policy that takes more memory than the machine has, before any of it is allocated: the kernel would kill.

    Activations and gradients are not counted. A GPU refuses by itself.

    Args:
        policy: from `benchbox.session.build.build_cell_policy`.
        ranks: that have weights on this machine; None for those that were started here together.

    Raises:
        UnsupportedError: with both sizes.
    """
    if rank_device().type != "cpu":
        return
    ranks = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, usable = round(ranks * rank_bytes(cell, policy)), usable_memory_bytes()
    if needed > usable:
        raise UnsupportedError(
            f"weights and optimizer state of {cell.policy} {cell.size} take {needed / 2**30:.1f} GiB at "
            f"least on this machine (ranks: {ranks}), and it has {usable / 2**30:.1f} GiB; choose another size or machine"
        )


def rank_bytes(cell: Cell, policy: Policy) -> float:
    """Return the least bytes of weights and optimizer state of a rank: whatever a backend may shard is sharded."""
    assert isinstance(policy, nn.Module)
    recipe = recipe_by_name(cell.recipe)
    shards = cell.world_size if backend_info(cell.backend).shards_optimizer else 1
    live = DTYPES[recipe.storage].itemsize
    stepped = live if recipe.stepped is None else DTYPES[recipe.stepped].itemsize
    moments = STATES_PER_ELEMENT.get(recipe.optimizer, 0)  # an unknown optimizer may have none
    if cell.optim.freeze_backbone_steps:  # a backbone that no step thaws never has any
        moments = 0
    numel = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    if cell.freeze != "full":  # how much that leaves is not known yet
        trained = 0
    return (live * (numel - trained) + stepped * trained * (1 + moments)) / shards
