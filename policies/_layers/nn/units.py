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
    Keys = tuple[Tensor, Tensor]
    Reading = tuple[Tensor, Visible, Tensor]
    Acting = tuple[Tensor, Visible, Tensor, Tensor | None]


class _Reader(Unit):
    """What holds a backbone layer."""

    def __init__(self, backbone: DecoderConfig, layer: int, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.backbone = DecoderLayer(backbone, layer)
        self.kernel = axes.attention

    def _through(self, hidden: Tensor, visible: Visible, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, gate = self.backbone.before(hidden, positions, None)
        attended = attend(query, key, value, visible, self.kernel, self.backbone.softcap)
        return self.backbone.after(hidden, attended, gate, None), key, value


class BackboneLayer(_Reader):
    """One backbone layer: the stream attends to itself."""

    def block(self, hidden: Tensor, visible: Visible, positions: Tensor) -> Any:
        """The stream (B, P, W) one layer on; `visible` (B, P, P) bool or a block mask, `positions` (B, P) int64."""
        return self._through(hidden, visible, positions)[0]


class LayerPair(_Reader):
    """One backbone layer and one expert layer, run by one call, so that a sharded pair is gathered once a forward.

    The prefix attends to itself. The suffix attends to the prefix, which it sees as keys and values of the same layer, and to
    itself. With `insulated` those keys and values are detached: the flow loss then leaves the backbone alone. Where nothing
    hears of the prefix after this layer (`prefix_kv_only`) it goes no further, and what would take it further is not trained.
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
        prefix_kv_only: bool,
    ) -> None:
        super().__init__(backbone, layer, axes)
        self.expert = DecoderLayer(expert, layer, adaptive=adaptive)
        self.insulated = insulated
        self.prefix_kv_only = prefix_kv_only
        if prefix_kv_only:
            self.backbone.requires_grad_(False)
            for read in (self.backbone.attention_norm, self.backbone.key, self.backbone.key_norm, self.backbone.value):
                if read is not None:
                    read.requires_grad_(True)

    def block(self, prefix: Reading | None, suffix: Acting | None = None, read: Keys | None = None) -> Any:
        """Both streams one layer on, or one of them: a prefix is read once and acted on many times.

        Args:
            prefix: hidden (B, P, W), what it sees of itself (B, P, P) bool or a block mask, positions (B, P) int64; or None
                when its keys and values are given.
            suffix: hidden (B, S, V), what it sees of prefix and suffix (B, S, P + S) bool or a block mask, positions (B, S)
                int64, condition (B, V) for an adaptive expert, else None; or None to read the prefix alone.
            read: key and value (B, G, P, D) of the prefix, from an earlier call.

        Returns:
            (prefix, suffix); without a suffix (prefix, read); without a prefix the suffix. Hidden states, shaped as they came.
        """
        if prefix is None:
            assert suffix is not None
            assert read is not None
            return self._act(suffix, read)
        hidden, keys = self._read(*prefix)
        if suffix is None:
            return hidden, keys
        if self.insulated:
            keys = keys[0].detach(), keys[1].detach()
        return hidden, self._act(suffix, keys)

    def _read(self, hidden: Tensor, visible: Visible, positions: Tensor) -> tuple[Tensor, Keys]:
        if self.prefix_kv_only:
            return hidden, self.backbone.keys(hidden, positions)
        hidden, key, value = self._through(hidden, visible, positions)
        return hidden, (key, value)

    def _act(self, suffix: Acting, read: Keys) -> Tensor:
        hidden, visible, positions, condition = suffix
        query, key, value, gate = self.expert.before(hidden, positions, condition)
        key, value = torch.cat((read[0], key), dim=2), torch.cat((read[1], value), dim=2)
        attended = attend(query, key, value, visible, self.kernel, self.expert.softcap)
        return self.expert.after(hidden, attended, gate, condition)
