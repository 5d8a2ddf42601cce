"""Construction of a policy on the CPU from its seed, without the meta device: what the weights of every backend must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchbox.spec.cell import Cell


def build_directly(cell: Cell) -> nn.Module:
    """Build the policy of a cell on the CPU. It is not frozen, and its statistics are not loaded."""
    torch.manual_seed(cell.seed)
    axes = Axes(cams=cell.cams, attention=cell.attention, checkpointing=cell.checkpointing, mode=cell.data.mode)
    return build_policy(cell.policy, cell.size, axes)  # type: ignore[return-value]


def initial_parameters(cell: Cell) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in build_directly(cell).named_parameters()}
