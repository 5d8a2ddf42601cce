"""A stream of tokens as a list of blocks, from which masks and positions follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from .attention_mask import AttentionMask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Attention = Literal["continue", "bidirectional", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of tokens.

    `continue` lets it and the block before it see one another, `bidirectional` starts a group that sees itself and what came
    before, `causal` makes each token a group of its own. What the suffix must not read has `readable` False. A causal block
    with `targets` is learned: each of its tokens is to be predicted from what stands before it.
    """

    name: str
    hidden: Tensor  # (B, L, W)
    valid: Tensor  # (B, L) bool
    attention: Attention
    readable: bool = True
    targets: Tensor | None = None  # (B, L) int64


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Blocks laid end to end."""

    hidden: Tensor  # (B, P, W)
    valid: Tensor  # (B, P) bool
    readable: Tensor  # (B, P) bool: valid, and the suffix may read it
    groups: Tensor  # (P,) int64: cumulative count of groups
    spans: dict[str, slice]
    learned: tuple[Block, ...]

    @property
    def positions(self) -> Tensor:
        """(B, P) int64; padding takes no position of its own."""
        return self.valid.long().cumsum(dim=1) - 1

    def attention_mask(self) -> AttentionMask:
        """What its tokens see of one another."""
        return AttentionMask(
            query_groups=self.groups,
            key_groups=self.groups,
            query_valid=self.valid,
            key_valid=self.valid,
            query_positions=self.positions,
            key_positions=self.positions,
        )

    def positions_after(self, prefix: TokenSequence) -> Tensor:
        """(B, S) int64, counted from the end of what can be read of the prefix: inference has no other prefix."""
        return self.positions + prefix.readable.sum(dim=1, keepdim=True)

    def attention_mask_after(self, prefix: TokenSequence) -> AttentionMask:
        """What the tokens of this suffix see of the readable prefix (all of it) and, after it, of one another."""
        positions = self.positions_after(prefix)
        groups = self.groups + prefix.groups[-1]
        return AttentionMask(
            query_groups=groups,
            key_groups=torch.cat((prefix.groups, groups)),
            query_valid=self.valid,
            key_valid=torch.cat((prefix.readable, self.valid), dim=1),
            query_positions=positions,
            key_positions=torch.cat((prefix.positions, positions), dim=1),
            first=len(prefix.groups),
        )

    def predictor_indices(self, name: str) -> Tensor:
        """(B, L) int64: for each token of a causal block, where in the stream the last valid token before it stands."""
        span = self.spans[name]
        places = torch.arange(self.valid.shape[1], device=self.valid.device)
        last = torch.where(self.valid, places, 0).cummax(dim=1).values
        return last[:, span.start - 1 : span.stop - 1]


def concat_blocks(blocks: Sequence[Block]) -> TokenSequence:
    """Lay blocks end to end."""
    spans: dict[str, slice] = {}
    offset = 0
    for block in blocks:
        length = block.hidden.shape[1]
        spans[block.name] = slice(offset, offset + length)
        offset += length
    return TokenSequence(
        hidden=torch.cat([block.hidden for block in blocks], dim=1),
        valid=torch.cat([block.valid for block in blocks], dim=1),
        readable=torch.cat([block.valid & block.readable for block in blocks], dim=1),
        groups=torch.cat([_starts(block) for block in blocks]).cumsum(dim=0),
        spans=spans,
        learned=tuple(block for block in blocks if block.targets is not None),
    )


def _starts(block: Block) -> Tensor:
    """(L,) bool: which tokens open a group. Made where the tokens are: a copy from the host would make the device wait."""
    places = torch.arange(block.hidden.shape[1], device=block.hidden.device)
    return {"continue": places < 0, "bidirectional": places == 0, "causal": places >= 0}[block.attention]


def select(hidden: Tensor, places: Tensor) -> Tensor:
    """Hidden states (B, P, W) at `places` (B, L): (B, L, W)."""
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
