"""A mixture of transformers (arXiv:2411.04996): text and generated tokens, each with separate weights in all layers.

The text attends only to itself, so it is computed once; generated tokens attend to the text and to themselves. In the terms of
`LayerPair` these are a backbone and an expert of the same sizes. Only the expert trains, as published. Rotary positions of
generated tokens have three axes, as in Qwen3-VL (arXiv:2511.21631).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .._layers.nn.decoder import INIT_STD, DecoderConfig, DecoderLayer
from .._layers.nn.norms import RMSNorm
from .._layers.nn.units import LayerPair
from .._layers.sequence.token_sequence import Attention, Block

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes

    from .._layers.families.vision_language import KVCache
    from .._layers.sequence.token_sequence import TokenSequence


class GridLayer(DecoderLayer):
    """A decoder layer of tokens with positions in time, height and width.

    Positions are (B, L, 3) int64, `stretch` times as fine as those of text. The axes are interleaved over the rotary pairs of a
    head: of 16 pairs five encode the height and five the width. The remaining pairs, the slowest among them, encode the time.
    """

    def __init__(self, config: DecoderConfig, layer: int, stretch: int) -> None:
        super().__init__(config, layer)
        self.rope_stretch = float(stretch)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self.head_dim // 2
        pair = torch.arange(pairs, device=positions.device)
        axis = torch.where(pair < 5 * pairs // 16 * 3, pair % 3, 0)
        axes = map(super()._cos_sin, positions.unbind(dim=-1))
        cos, sin = (torch.where(axis == 0, t, torch.where(axis == 1, h, w)) for t, h, w in zip(*axes, strict=True))
        return cos, sin


class MixtureLayer(LayerPair):
    """A layer of text, which is frozen, and of generated tokens. Nothing uses the text after the last (`prefix_kv_only`)."""

    def __init__(self, config: DecoderConfig, layer: int, axes: Axes, *, stretch: int, prefix_kv_only: bool) -> None:
        super().__init__(config, config, layer, axes, insulated=False, adaptive=False, prefix_kv_only=prefix_kv_only)
        # Replaces the expert of the base class, whose positions have one axis.
        self.expert = GridLayer(config, layer, stretch)
        self.backbone.requires_grad_(False)


class Mixture(nn.Module):
    """The frozen text embedding, the layers of text and generated tokens, and the final norm of generated tokens."""

    def __init__(self, config: DecoderConfig, vocabulary: int, axes: Axes, *, stretch: int) -> None:
        super().__init__()
        self.kernel = axes.attention
        self.vocabulary = nn.Embedding(vocabulary, config.width)
        nn.init.normal_(self.vocabulary.weight, std=INIT_STD)
        self.vocabulary.requires_grad_(False)
        self.layers = nn.ModuleList(
            MixtureLayer(config, layer, axes, stretch=stretch, prefix_kv_only=layer == config.depth - 1)
            for layer in range(config.depth)
        )
        self.expert_norm = RMSNorm(config.width, unit=config.unit_norm)

    def text(self, name: str, tokens: Tensor, mask: Tensor, attention: Attention, *, with_targets: bool = False) -> Block:
        """Embed the tokens of a text (B, L), where padding has `mask` False; optionally with the tokens as targets."""
        targets = tokens if with_targets else None
        return Block(name=name, hidden=self.vocabulary(tokens), valid=mask, attention=attention, targets=targets)

    def prefill(self, text: TokenSequence) -> KVCache:
        """Run the text through every layer and return its keys and values."""
        mask, positions = text.attention_mask().build(self.kernel), text.positions
        hidden, cache = text.hidden, []
        for layer in self.layers:
            hidden, key_value = layer((hidden, mask, positions))
            cache.append(key_value)
        return cache

    def forward(self, text: TokenSequence, generated: TokenSequence, positions: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return hidden states (B, S, W) of the generated tokens after their final norm.

        Args:
            text: of width W.
            generated: of width W; its tokens attend to one another and to the text.
            positions: (B, S, 3) int64, of the generated tokens.
            cache: keys and values of the text from `prefill`; with a cache the text is not computed again.
        """
        generated_mask = generated.attention_mask_after(text).build(self.kernel)
        text_mask = text.attention_mask().build(self.kernel)
        text_hidden, hidden = text.hidden, generated.hidden
        for index, layer in enumerate(self.layers):
            suffix = hidden, generated_mask, positions, None
            if cache is None:
                text_hidden, hidden = layer((text_hidden, text_mask, text.positions), suffix)
            else:
                hidden = layer(None, suffix, cache[index])
        return self.expert_norm(hidden)
