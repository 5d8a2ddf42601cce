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

    Mask = Tensor | BlockMask
    KeyValue = tuple[Tensor, Tensor]
    PrefixInputs = tuple[Tensor, Mask, Tensor]  # hidden, mask, positions
    SuffixInputs = tuple[Tensor, Mask, Tensor, Tensor | None]  # hidden, mask, positions, condition


class _BackboneUnit(Unit):
    """Base class of units with a backbone layer."""

    def __init__(self, backbone: DecoderConfig, layer: int, axes: Axes) -> None:
        super().__init__(checkpointing=axes.checkpointing)
        self.backbone = DecoderLayer(backbone, layer)
        self.kernel = axes.attention

    def _run_backbone(
        self, hidden: Tensor, mask: Mask, positions: Tensor, past: KeyValue | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, gate = self.backbone.project_qkv(hidden, positions, None)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        attended = attend(query, key, value, mask, self.kernel, self.backbone.softcap)
        return self.backbone.output_and_mlp(hidden, attended, gate, None), key, value


class BackboneLayer(_BackboneUnit):
    """One backbone layer of a sequence that attends to itself."""

    def block(self, hidden: Tensor, mask: Mask, positions: Tensor) -> Any:
        """Apply the layer to (B, P, W); `mask` (B, P, P) bool or a block mask, `positions` (B, P) int64."""
        return self._run_backbone(hidden, mask, positions)[0]


class LayerPair(_BackboneUnit):
    """One backbone layer and one expert layer, run by one call, so that a sharded pair is gathered once per forward.

    The prefix attends to itself. The suffix attends to the keys and values of the prefix in the same layer, and to itself. With
    `insulated` those keys and values are detached, so that the flow loss does not train the backbone. With `prefix_kv_only`
    only keys and values of the prefix are computed, because nothing uses its output, and the remaining parameters of the
    backbone layer are frozen.
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
            for module in (self.backbone.attention_norm, self.backbone.key, self.backbone.key_norm, self.backbone.value):
                if module is not None:
                    module.requires_grad_(True)

    def block(
        self, prefix: PrefixInputs | None, suffix: SuffixInputs | None = None, prefix_key_value: KeyValue | None = None
    ) -> Any:
        """Apply the layer to both sequences, or to one of them: at inference the prefix is computed once and cached.

        Args:
            prefix: hidden (B, P, W), mask (B, P, P) bool or a block mask, positions (B, P) int64; or None to compute the suffix
                alone. With `prefix_key_value` it is the continuation of that prefix, and its mask (B, P, past + P).
            suffix: hidden (B, S, V), mask (B, S, P + S) bool or a block mask, positions (B, S) int64, condition (B, V) for an
                adaptive expert, else None; or None to compute the prefix alone.
            prefix_key_value: key and value (B, G, P, D) of the prefix, from an earlier call.

        Returns:
            (prefix, suffix); without a suffix (prefix, prefix_key_value); without a prefix the suffix. Hidden states keep their
            shapes. The key and value of a continuation follow those of its past.
        """
        if prefix is None:
            assert suffix is not None
            assert prefix_key_value is not None
            return self._run_expert(suffix, prefix_key_value)
        hidden, key_value = self._run_prefix(*prefix, prefix_key_value)
        if suffix is None:
            return hidden, key_value
        if self.insulated:
            key_value = key_value[0].detach(), key_value[1].detach()
        return hidden, self._run_expert(suffix, key_value)

    def _run_prefix(self, hidden: Tensor, mask: Mask, positions: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        if self.prefix_kv_only:
            assert past is None, "a policy without texts to predict never continues a prefix"
            return hidden, self.backbone.project_key_value(hidden, positions)
        hidden, key, value = self._run_backbone(hidden, mask, positions, past)
        return hidden, (key, value)

    def _run_expert(self, suffix: SuffixInputs, prefix_key_value: KeyValue) -> Tensor:
        hidden, mask, positions, condition = suffix
        query, key, value, gate = self.expert.project_qkv(hidden, positions, condition)
        key, value = torch.cat((prefix_key_value[0], key), dim=2), torch.cat((prefix_key_value[1], value), dim=2)
        attended = attend(query, key, value, mask, self.kernel, self.expert.softcap)
        return self.expert.output_and_mlp(hidden, attended, gate, condition)
