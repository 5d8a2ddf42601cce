"""PaliGemma with an action expert beside it: what pi0, pi05 and their relatives are built from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .gemma import GemmaConfig
from .norms import AdaRMSNorm, RMSNorm
from .pair import LayerPair
from .precision import Linear
from .prefix import Attention, Block, Prefix
from .presets import CLOSED
from .siglip import Siglip, SiglipConfig
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes


@dataclass(config=CLOSED, frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Where the expert differs from the backbone it attends to."""

    width: PositiveInt
    mlp: PositiveInt


@dataclass(config=CLOSED, frozen=True, slots=True, kw_only=True)
class PaliGemmaConfig:
    """Sizes of the tower, the backbone and the expert."""

    vision: SiglipConfig
    backbone: GemmaConfig
    expert: ExpertConfig
    vocabulary: PositiveInt


class PaliGemma(nn.Module):
    """Vision tower, projector, text table, and one layer pair after another, with a conditioned (adaRMS) expert."""

    def __init__(self, config: PaliGemmaConfig, axes: Axes, *, insulated: bool) -> None:
        super().__init__()
        expert = replace(config.backbone, width=config.expert.width, mlp=config.expert.mlp)
        self.vision = Siglip(config.vision, axes)
        self.projector = Linear(config.vision.width, config.backbone.width)
        self.vocabulary = Vocabulary(config.vocabulary, config.backbone.width)
        self.pairs = nn.ModuleList(
            LayerPair(config.backbone, expert, axes, insulated=insulated, adaptive=True) for _ in range(config.backbone.depth)
        )
        self.backbone_norm = RMSNorm(config.backbone.width)
        self.expert_norm = AdaRMSNorm(expert.width)

    def images(self, images: Tensor, mask: Tensor) -> Block:
        """The tokens of images (B, C, 3, H, W) uint8, camera by camera; a camera with `mask` (B, C) False is padding."""
        features = self.projector(self.vision(images.flatten(0, 1)))  # (B * C, patches, W)
        hidden = features.unflatten(0, mask.shape).flatten(1, 2)
        valid = mask.repeat_interleave(features.shape[1], dim=1)
        return Block(name="images", hidden=hidden, valid=valid, attention="bidirectional")

    def text(self, name: str, tokens: Tensor, mask: Tensor, attention: Attention) -> Block:
        """The tokens of a text (B, L); padding has `mask` False."""
        return Block(name=name, hidden=self.vocabulary(tokens), valid=mask, attention=attention)

    def forward(self, prefix: Prefix, suffix: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Run both streams through every pair.

        Args:
            prefix: of width W.
            suffix: (B, S, V), sees itself and the readable prefix.
            condition: (B, V), of the expert's norms.

        Returns:
            The prefix (B, P, W) before its final norm (`backbone_norm`, for those tokens that are scored), and the suffix
            (B, S, V) after its own.
        """
        length = suffix.shape[1]
        masks = prefix.visible(), prefix.visible_to_suffix(length)
        positions = prefix.positions, prefix.suffix_positions(length)
        hidden = prefix.hidden
        for pair in self.pairs:
            hidden, suffix = pair(hidden, suffix, condition, *masks, *positions)
        return hidden, self.expert_norm(suffix, condition)[0]
