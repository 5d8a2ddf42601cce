"""A backbone layer and its expert layer as one module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .attention import attend
from .gemma import GemmaConfig, GemmaLayer
from .unit import Unit

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes


class LayerPair(Unit):
    """One backbone layer and one expert layer, run by one call, so that a sharded pair is gathered once a forward.

    The prefix attends to itself. The suffix attends to the prefix, which it sees as keys and values of the same layer, and to
    itself. With `insulated` those keys and values are detached: the flow loss then leaves the backbone alone.
    """

    def __init__(self, backbone: GemmaConfig, expert: GemmaConfig, axes: Axes, *, insulated: bool, adaptive: bool) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.backbone = GemmaLayer(backbone)
        self.expert = GemmaLayer(expert, adaptive=adaptive)
        self.kernel = axes.attention
        self.insulated = insulated

    def block(
        self,
        prefix: Tensor,
        suffix: Tensor,
        condition: Tensor | None,
        prefix_visible: Tensor,
        suffix_visible: Tensor,
        prefix_positions: Tensor,
        suffix_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Both streams one layer on.

        Args:
            prefix: (B, P, W).
            suffix: (B, S, V).
            condition: (B, V) for an adaptive expert, else None.
            prefix_visible: (B, P, P) bool, what a prefix query sees of the prefix.
            suffix_visible: (B, S, P + S) bool, what a suffix query sees of prefix and suffix.
            prefix_positions: (B, P) int64.
            suffix_positions: (B, S) int64.

        Returns:
            The new prefix and suffix, shaped as they came.
        """
        query, key, value, gate = self.backbone.before(prefix, prefix_positions, None)
        attended = attend(query, key, value, prefix_visible, self.kernel)
        prefix = self.backbone.after(prefix, attended, gate, None)

        if self.insulated:
            key, value = key.detach(), value.detach()
        query, own_key, own_value, gate = self.expert.before(suffix, suffix_positions, condition)
        keys, values = torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2)
        attended = attend(query, keys, values, suffix_visible, self.kernel)
        return prefix, self.expert.after(suffix, attended, gate, condition)
