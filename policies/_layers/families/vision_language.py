"""Vision-language models, alone and with an action expert beside them: what the policies are built from."""

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
    """Where the expert differs from the backbone it attends to."""

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
        """Of one camera."""
        return self.vision.tokens // (self.pool or 1) ** 2


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class VisionLanguageActionConfig(VisionLanguageConfig):
    """The same, and the expert."""

    expert: ExpertConfig


class VisionLanguage(nn.Module):
    """Vision tower, projector, text table and decoder layers: PaliGemma, PaliGemma 2, Gemma 3."""

    def __init__(self, config: VisionLanguageConfig, axes: Axes, unit: Callable[[int], Unit] | None = None) -> None:
        """`unit` makes the layer of a number; by default a backbone layer alone."""
        super().__init__()
        backbone = config.backbone
        unit = unit or (lambda layer: BackboneLayer(backbone, layer, axes))
        self.kernel, self.windows = axes.attention, backbone.windows
        self.vision = Siglip(config.vision, axes)
        self.projector = (
            Linear(config.vision.width, backbone.width)
            if config.pool is None
            else PooledProjector(config.vision.width, backbone.width, config.pool)
        )
        self.vocabulary = Vocabulary(config.vocabulary, backbone.width)
        self.layers = nn.ModuleList(map(unit, range(backbone.depth)))
        self.norm = RMSNorm(backbone.width)

    def images(self, name: str, images: Tensor, mask: Tensor, attention: Attention = "bidirectional") -> Block:
        """The tokens of images (B, T, C, 3, H, W) uint8, camera by camera: those of the current frame, the last of T, which may
        have seen the others. Where `mask` (B, T, C) is False a frame is padding.
        """
        pixels, real = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (images, mask))
        features = self.projector(self.vision(pixels, real))  # (B * C, tokens, W)
        current = mask[:, -1]
        hidden = features.unflatten(0, current.shape).flatten(1, 2)
        valid = current.repeat_interleave(features.shape[1], dim=1)
        return Block(name=name, hidden=hidden, valid=valid, attention=attention)

    def text(self, name: str, tokens: Tensor, mask: Tensor, attention: Attention, *, learned: bool = False) -> Block:
        """The tokens of a text (B, L); padding has `mask` False."""
        hidden = self.vocabulary(tokens)
        return Block(name=name, hidden=hidden, valid=mask, attention=attention, targets=tokens if learned else None)

    def forward(self, stream: TokenSequence) -> Tensor:
        """The stream (B, P, W) through every layer, before the final norm (`norm`, for those tokens that are read)."""
        masks, positions, hidden = self._masks(stream.attention_mask()), stream.positions, stream.hidden
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden = layer(hidden, masks[window], positions)
        return hidden

    def _masks(self, attention_mask: AttentionMask) -> dict[int | None, Tensor | BlockMask]:
        """One mask for each window that a layer has."""
        return {window: attention_mask.mask(self.kernel, window) for window in dict.fromkeys(self.windows)}


KVCache = list["tuple[Tensor, Tensor]"]  # keys and values (B, G, P, D) of each layer


class VisionLanguageAction(VisionLanguage):
    """The same with an expert layer beside each backbone layer, and the expert's final norm.

    An `adaptive` expert has norms conditioned on time (adaRMS). An `insulated` backbone is not trained by the expert's loss.
    Without texts to predict (`scored`) only the expert reads the prefix, and of the last layer only keys and values.
    """

    def __init__(self, config: VisionLanguageActionConfig, axes: Axes, *, insulated: bool, adaptive: bool, predicts_text: bool) -> None:
        expert = replace(config.backbone, width=config.expert.width, mlp=config.expert.mlp)

        def pair(layer: int) -> LayerPair:
            prefix_kv_only = not predicts_text and layer == config.backbone.depth - 1
            return LayerPair(config.backbone, expert, layer, axes, insulated=insulated, adaptive=adaptive, prefix_kv_only=prefix_kv_only)

        super().__init__(config, axes, pair)
        self.norm.requires_grad_(predicts_text)
        self.expert_norm = AdaRMSNorm(expert.width) if adaptive else RMSNorm(expert.width)

    def forward(self, prefix: TokenSequence, suffix: TokenSequence | None = None, condition: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Both streams through every layer.

        Args:
            prefix: of width W.
            suffix: of width V, sees itself and the readable prefix.
            condition: (B, V), of an adaptive expert's norms.

        Returns:
            The prefix (B, P, W) before its final norm (`norm`, for those tokens that are scored), and the suffix (B, S, V)
            after its own.
        """
        assert suffix is not None
        masks, suffix_masks = self._masks(prefix.attention_mask()), self._masks(suffix.attention_mask_after(prefix))
        positions, suffix_positions = prefix.positions, suffix.positions_after(prefix)
        hidden, acting = prefix.hidden, suffix.hidden
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden, acting = layer(
                (hidden, masks[window], positions), (acting, suffix_masks[window], suffix_positions, condition)
            )
        return hidden, self._norm_expert(acting, condition)

    def read(self, prefix: TokenSequence) -> KVCache:
        """The prefix through every layer, once; what suffixes need of it."""
        masks, positions, hidden = self._masks(prefix.attention_mask()), prefix.positions, prefix.hidden
        cache: KVCache = []
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden, keys = layer((hidden, masks[window], positions))
            cache.append(keys)
        return cache

    def act(self, prefix: TokenSequence, cache: KVCache, suffix: TokenSequence, condition: Tensor | None) -> Tensor:
        """The suffix (B, S, V) after its final norm, given what `read` found in the prefix."""
        masks, positions, hidden = self._masks(suffix.attention_mask_after(prefix)), suffix.positions_after(prefix), suffix.hidden
        for layer, window, keys in zip(self.layers, self.windows, cache, strict=True):
            hidden = layer(None, (hidden, masks[window], positions, condition), keys)
        return self._norm_expert(hidden, condition)

    def _norm_expert(self, hidden: Tensor, condition: Tensor | None) -> Tensor:
        return self.expert_norm(hidden) if condition is None else self.expert_norm(hidden, condition)[0]
