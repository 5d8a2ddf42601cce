"""Vision-language models, alone and with an action expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from ..nn.decoder import DecoderConfig
from ..nn.norms import AdaRMSNorm, RMSNorm
from ..nn.precision import Linear
from ..nn.projector import PooledProjector
from ..nn.siglip import Siglip, SiglipConfig
from ..nn.units import BackboneLayer, LayerPair
from ..nn.vocabulary import Vocabulary
from ..presets import FORBID_EXTRA
from ..sequence.token_sequence import Attention, Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import Axes

    from ..nn.unit import Unit
    from ..sequence.attention_mask import AttentionMask
    from ..sequence.token_sequence import TokenSequence


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Sizes of the action expert that differ from the backbone, to which it attends.

    Its layers are those of the first Gemma beside any backbone (as in OpenTau): no norms after attention and MLP, and none of
    queries and keys. They share heads and RoPE with the backbone, because both attend to the same keys.
    """

    width: PositiveInt
    mlp: PositiveInt


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class VisionLanguageConfig:
    """Sizes of the tower and the backbone. With `pool`, as in Gemma 3, squares of pool x pool patches become one token."""

    vision: SiglipConfig
    backbone: DecoderConfig
    vocabulary: PositiveInt
    pool: PositiveInt | None = None

    @property
    def image_tokens(self) -> int:
        """Number of tokens per camera."""
        return self.vision.tokens // (self.pool or 1) ** 2


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class VisionLanguageActionConfig(VisionLanguageConfig):
    """Sizes of the tower, the backbone and the action expert."""

    expert: ExpertConfig


class VisionLanguage(nn.Module):
    """Vision tower, projector, text embedding and decoder layers: PaliGemma, PaliGemma 2, Gemma 3."""

    def __init__(self, config: VisionLanguageConfig, axes: Axes, make_unit: Callable[[int], Unit] | None = None) -> None:
        """Build the model; `make_unit` returns the unit of a layer index, by default a `BackboneLayer`."""
        super().__init__()
        backbone = config.backbone
        make_unit = make_unit or (lambda layer: BackboneLayer(backbone, layer, axes))
        self.kernel, self.windows = axes.attention, backbone.windows
        self.vision = Siglip(config.vision, axes)
        self.projector = (
            Linear(config.vision.width, backbone.width)
            if config.pool is None
            else PooledProjector(config.vision.width, backbone.width, config.pool)
        )
        self.vocabulary = Vocabulary(config.vocabulary, backbone.width)
        self.layers = nn.ModuleList(map(make_unit, range(backbone.depth)))
        self.norm = RMSNorm(backbone.width)

    def images(self, name: str, images: Tensor, mask: Tensor, attention: Attention = "bidirectional") -> Block:
        """Embed the current (last) frames of images, camera by camera; they may attend to the earlier frames.

        Args:
            name: of the block.
            images: (B, T, C, 3, H, W) uint8.
            mask: (B, T, C) bool, False where a frame is padding.
            attention: of the block.
        """
        pixels, valid_frames = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (images, mask))
        features = self.projector(self.vision(pixels, valid_frames))  # (B * C, tokens, W)
        current = mask[:, -1]
        hidden = features.unflatten(0, current.shape).flatten(1, 2)
        valid = current.repeat_interleave(features.shape[1], dim=1)
        return Block(name=name, hidden=hidden, valid=valid, attention=attention)

    def text(self, name: str, tokens: Tensor, mask: Tensor, attention: Attention, *, with_targets: bool = False) -> Block:
        """Embed the tokens of a text (B, L), where padding has `mask` False; optionally with the tokens as targets."""
        hidden = self.vocabulary(tokens)
        return Block(name=name, hidden=hidden, valid=mask, attention=attention, targets=tokens if with_targets else None)

    def forward(self, sequence: TokenSequence) -> Tensor:
        """Return hidden states (B, P, W) before the final norm (`norm`), which is applied only to the tokens that are used."""
        masks, positions, hidden = self._masks(sequence.attention_mask()), sequence.positions, sequence.hidden
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden = layer(hidden, masks[window], positions)
        return hidden

    def _masks(self, attention_mask: AttentionMask) -> dict[int | None, Tensor | BlockMask]:
        """Return one mask for each distinct window of the layers."""
        return {window: attention_mask.build(self.kernel, window) for window in dict.fromkeys(self.windows)}


KVCache = list["tuple[Tensor, Tensor]"]  # keys and values (B, G, P, D) of each layer


class VisionLanguageAction(VisionLanguage):
    """A vision-language model with an expert layer next to each backbone layer, and the expert's final norm.

    The norms of an `adaptive` expert are conditioned on time (adaRMS). An `insulated` backbone is not trained by the expert's
    loss. Unless the backbone `predicts_text`, its last layer computes only the keys and values for the expert.
    """

    def __init__(
        self, config: VisionLanguageActionConfig, axes: Axes, *, insulated: bool, adaptive: bool, predicts_text: bool
    ) -> None:
        sizes = config.expert
        expert = replace(config.backbone, width=sizes.width, mlp=sizes.mlp, sandwich=False, qk_norm=False)

        def make_pair(layer: int) -> LayerPair:
            return LayerPair(
                config.backbone,
                expert,
                layer,
                axes,
                insulated=insulated,
                adaptive=adaptive,
                prefix_kv_only=not predicts_text and layer == config.backbone.depth - 1,
            )

        super().__init__(config, axes, make_pair)
        self.norm.requires_grad_(predicts_text)
        self.expert_norm = AdaRMSNorm(expert.width) if adaptive else RMSNorm(expert.width)

    def forward(  # type: ignore[override]
        self, prefix: TokenSequence, suffix: TokenSequence | None = None, condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run prefix and suffix through every layer.

        Args:
            prefix: of width W.
            suffix: of width V; attends to itself and to the visible part of the prefix.
            condition: (B, V), of an adaptive expert's norms.

        Returns:
            The prefix (B, P, W) before its final norm (`norm`), which is applied only to the tokens that are used, and the
            suffix (B, S, V) after its own final norm.
        """
        assert suffix is not None
        masks, suffix_masks = self._masks(prefix.attention_mask()), self._masks(suffix.attention_mask_after(prefix))
        positions, suffix_positions = prefix.positions, suffix.positions_after(prefix)
        hidden, expert_hidden = prefix.hidden, suffix.hidden
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden, expert_hidden = layer(
                (hidden, masks[window], positions), (expert_hidden, suffix_masks[window], suffix_positions, condition)
            )
        return hidden, self._norm_expert(expert_hidden, condition)

    def prefill(self, prefix: TokenSequence) -> KVCache:
        """Run the prefix through every layer and return its keys and values."""
        return self.run_prefix(prefix)[1]

    def run_prefix(
        self, prefix: TokenSequence, past: TokenSequence | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, KVCache]:
        """Run a prefix, or the continuation of one, through every layer.

        Args:
            prefix: of length P.
            past: what the prefix continues, with the `cache` of its keys and values.

        Returns:
            Its hidden states (B, P, W) before the final norm (`norm`), and the keys and values of past and prefix.
        """
        masks = self._masks(prefix.attention_mask() if past is None else prefix.attention_mask_after(past))
        positions = prefix.positions if past is None else prefix.positions_after(past)
        hidden, extended = prefix.hidden, []
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            hidden, key_value = layer((hidden, masks[window], positions), None, None if cache is None else cache[index])
            extended.append(key_value)
        return hidden, extended

    def forward_suffix(self, prefix: TokenSequence, cache: KVCache, suffix: TokenSequence, condition: Tensor | None) -> Tensor:
        """Return the suffix (B, S, V) after its final norm, using the cache of the prefix from `prefill`."""
        masks, hidden = self._masks(suffix.attention_mask_after(prefix)), suffix.hidden
        positions = suffix.positions_after(prefix)
        for layer, window, key_value in zip(self.layers, self.windows, cache, strict=True):
            hidden = layer(None, (hidden, masks[window], positions, condition), key_value)
        return self._norm_expert(hidden, condition)

    def _norm_expert(self, hidden: Tensor, condition: Tensor | None) -> Tensor:
        return self.expert_norm(hidden) if condition is None else self.expert_norm(hidden, condition)[0]
