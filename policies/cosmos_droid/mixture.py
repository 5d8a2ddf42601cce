"""A mixture of transformers (arXiv:2411.04996): text and what is generated from it, each with weights of its own in all layers.

The text sees itself alone, so it is read once; what is generated sees the text and itself. That is a backbone and an expert of
the same sizes. Rotary positions of what is generated have three axes, as in Qwen3-VL (arXiv:2511.21631).
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
    """A decoder layer of tokens that have a place in time, height and width.

    Positions are (B, L, 3) int64, `stretch` of them to one of a text. The axes take the pairs of a head in turn: of 16 pairs
    five tell the height and five the width. The slowest, which are left over, tell the time.
    """

    def __init__(self, config: DecoderConfig, layer: int, stretch: int) -> None:
        super().__init__(config, layer)
        self.rope_stretch = float(stretch)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = self.head_dim // 2
        pair = torch.arange(pairs, device=positions.device)
        axis = torch.where(pair < 5 * pairs // 16 * 3, pair % 3, 0)
        turns = map(super()._cos_sin, positions.unbind(dim=-1))
        cos, sin = (torch.where(axis == 0, t, torch.where(axis == 1, y, x)) for t, y, x in zip(*turns, strict=True))
        return cos, sin


class MixtureLayer(LayerPair):
    """A layer of both streams. After the last nothing hears of the text (`prefix_kv_only`)."""

    def __init__(self, config: DecoderConfig, layer: int, axes: Axes, *, stretch: int, prefix_kv_only: bool) -> None:
        super().__init__(config, config, layer, axes, insulated=False, adaptive=False, prefix_kv_only=prefix_kv_only)
        # In place of the pair's own, whose positions have one axis.
        self.expert = GridLayer(config, layer, stretch)


class Mixture(nn.Module):
    """The table of text tokens, the layers of both streams, and the final norm of what is generated."""

    def __init__(self, config: DecoderConfig, vocabulary: int, axes: Axes, *, stretch: int) -> None:
        super().__init__()
        self.kernel = axes.attention
        self.vocabulary = nn.Embedding(vocabulary, config.width)
        nn.init.normal_(self.vocabulary.weight, std=INIT_STD)
        self.layers = nn.ModuleList(
            MixtureLayer(config, layer, axes, stretch=stretch, prefix_kv_only=layer == config.depth - 1)
            for layer in range(config.depth)
        )
        self.expert_norm = RMSNorm(config.width, unit=config.unit_norm)

    def text(self, name: str, tokens: Tensor, mask: Tensor, attention: Attention, *, learned: bool = False) -> Block:
        """The tokens of a text (B, L); padding has `mask` False."""
        targets = tokens if learned else None
        return Block(name=name, hidden=self.vocabulary(tokens), valid=mask, attention=attention, targets=targets)

    def read(self, text: TokenSequence) -> KVCache:
        """Keys and values of the text in every layer."""
        reading = text.attention_mask().mask(self.kernel), text.positions
        hidden, cache = text.hidden, []
        for layer in self.layers:
            hidden, keys = layer((hidden, *reading))
            cache.append(keys)
        return cache

    def forward(self, text: TokenSequence, tokens: TokenSequence, places: Tensor, cache: KVCache | None = None) -> Tensor:
        """What is generated (B, S, W), after its final norm.

        Args:
            text: of width W.
            tokens: of width W; they see one another, and the text.
            places: (B, S, 3) int64, of the tokens.
            cache: what `read` found in the text, which is then not read again.
        """
        attention_mask = tokens.attention_mask_after(text).mask(self.kernel)
        reading = text.attention_mask().mask(self.kernel), text.positions
        hidden, generated = text.hidden, tokens.hidden
        for index, layer in enumerate(self.layers):
            acting = generated, attention_mask, places, None
            if cache is None:
                hidden, generated = layer((hidden, *reading), acting)
            else:
                generated = layer(None, acting, cache[index])
        return self.expert_norm(generated)
