"""Units of sharding: a backbone layer alone, and a backbone layer with its expert layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .attention import attend
from .decoder import DecoderConfig, DecoderLayer
from .unit import Unit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import Axes

    Visible = Tensor | BlockMask


class BackboneLayer(Unit):
    """One backbone layer: the stream attends to itself."""

    def __init__(self, backbone: DecoderConfig, layer: int, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.backbone = DecoderLayer(backbone, layer)
        self.kernel = axes.attention

    def block(self, hidden: Tensor, visible: Visible, positions: Tensor) -> Any:
        """The stream (B, P, W) one layer on; `visible` (B, P, P) bool or a block mask, `positions` (B, P) int64."""
        return self._through(hidden, visible, positions)[0]

    def _through(self, hidden: Tensor, visible: Visible, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, gate = self.backbone.before(hidden, positions, None)
        attended = attend(query, key, value, visible, self.kernel, self.backbone.softcap)
        return self.backbone.after(hidden, attended, gate, None), key, value


class LayerPair(BackboneLayer):
    """One backbone layer and one expert layer, run by one call, so that a sharded pair is gathered once a forward.

    The prefix attends to itself. The suffix attends to the prefix, which it sees as keys and values of the same layer, and to
    itself. With `insulated` those keys and values are detached: the flow loss then leaves the backbone alone. Where nothing
    hears of the prefix after this layer (`unheard`) it goes no further, and what would take it further is not trained.
    """

    def __init__(
        self,
        backbone: DecoderConfig,
        expert: DecoderConfig,
        layer: int,
        axes: Axes,
        *,
        insulated: bool,
        adaptive: bool,
        unheard: bool,
    ) -> None:
        super().__init__(backbone, layer, axes)
        self.expert = DecoderLayer(expert, layer, adaptive=adaptive)
        self.insulated = insulated
        self.unheard = unheard
        if unheard:
            self.backbone.requires_grad_(False)
            for read in (self.backbone.attention_norm, self.backbone.key, self.backbone.key_norm, self.backbone.value):
                if read is not None:
                    read.requires_grad_(True)

    def block(
        self,
        prefix: Tensor | None,
        prefix_visible: Visible | None,
        prefix_positions: Tensor | None,
        suffix: Tensor | None = None,
        suffix_visible: Visible | None = None,
        suffix_positions: Tensor | None = None,
        condition: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
    ) -> Any:
        """Both streams one layer on, or one of them: a prefix is read once and acted on many times.

        Args:
            prefix: (B, P, W), or None when its keys and values are given.
            prefix_visible: (B, P, P) bool or a block mask, what a prefix query sees of the prefix.
            prefix_positions: (B, P) int64.
            suffix: (B, S, V), or None to read the prefix alone.
            suffix_visible: (B, S, P + S) bool or a block mask, what a suffix query sees of prefix and suffix.
            suffix_positions: (B, S) int64.
            condition: (B, V) for an adaptive expert, else None.
            key: (B, G, P, D) of the prefix, from an earlier call.
            value: (B, G, P, D) likewise.

        Returns:
            (prefix, suffix); without a suffix (prefix, key, value); without a prefix the suffix. Shaped as they came.
        """
        if prefix is not None:
            prefix, key, value = self._read(prefix, prefix_visible, prefix_positions)
            if suffix is None:
                return prefix, key, value
            if self.insulated:
                key, value = key.detach(), value.detach()
        query, own_key, own_value, gate = self.expert.before(suffix, suffix_positions, condition)
        keys, values = torch.cat((key, own_key), dim=2), torch.cat((value, own_value), dim=2)
        attended = attend(query, keys, values, suffix_visible, self.kernel, self.expert.softcap)
        suffix = self.expert.after(suffix, attended, gate, condition)
        return suffix if prefix is None else (prefix, suffix)

    def _read(self, prefix: Tensor, visible: Visible, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.unheard:
            return prefix, *self.backbone.keys(prefix, positions)
        return self._through(prefix, visible, positions)
