"""A token sequence as a list of blocks, from which attention masks and positions follow."""

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
    """A run of tokens with one attention pattern.

    `bidirectional` starts a new group, whose tokens attend to one another and to all earlier groups. `continue` adds the tokens
    to the group of the previous block. `causal` makes each token a group of its own. With `visible_to_suffix` False the suffix
    must not attend to the block. A causal block with `targets` is trained by next-token prediction.
    """

    name: str
    hidden: Tensor  # (B, L, W)
    valid: Tensor  # (B, L) bool
    attention: Attention
    visible_to_suffix: bool = True
    targets: Tensor | None = None  # (B, L) int64


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Concatenated blocks."""

    hidden: Tensor  # (B, P, W)
    valid: Tensor  # (B, P) bool
    visible_to_suffix: Tensor  # (B, P) bool: valid, and the suffix may attend to it
    groups: Tensor  # (P,) int64: cumulative count of groups
    spans: dict[str, slice]
    target_blocks: tuple[Block, ...]

    @property
    def positions(self) -> Tensor:
        """Positions (B, P) int64; padding takes no position of its own."""
        return self.valid.long().cumsum(dim=1) - 1

    def attention_mask(self) -> AttentionMask:
        """Return the mask of self-attention within the sequence."""
        return AttentionMask(
            query_groups=self.groups,
            key_groups=self.groups,
            query_valid=self.valid,
            key_valid=self.valid,
            query_positions=self.positions,
            key_positions=self.positions,
        )

    def positions_after(self, prefix: TokenSequence) -> Tensor:
        """Return positions (B, S) int64 of this suffix.

        They count from the end of the visible part of the prefix, because at inference the prefix has no other part.
        """
        return self.positions + prefix.visible_to_suffix.sum(dim=1, keepdim=True)

    def attention_mask_after(self, prefix: TokenSequence) -> AttentionMask:
        """Return the mask of this suffix over the visible part of the prefix (all of it) followed by the suffix itself."""
        positions = self.positions_after(prefix)
        groups = self.groups + prefix.groups[-1]
        return AttentionMask(
            query_groups=groups,
            key_groups=torch.cat((prefix.groups, groups)),
            query_valid=self.valid,
            key_valid=torch.cat((prefix.visible_to_suffix, self.valid), dim=1),
            query_positions=positions,
            key_positions=torch.cat((prefix.positions, positions), dim=1),
            query_offset=len(prefix.groups),
        )

    def predictor_indices(self, name: str) -> Tensor:
        """Return, for each token of a causal block, the index of the last valid token before it: (B, L) int64."""
        span = self.spans[name]
        indices = torch.arange(self.valid.shape[1], device=self.valid.device)
        last_valid = torch.where(self.valid, indices, 0).cummax(dim=1).values
        return last_valid[:, span.start - 1 : span.stop - 1]


def concat_blocks(blocks: Sequence[Block]) -> TokenSequence:
    """Concatenate blocks into one sequence."""
    spans: dict[str, slice] = {}
    offset = 0
    for block in blocks:
        length = block.hidden.shape[1]
        spans[block.name] = slice(offset, offset + length)
        offset += length
    return TokenSequence(
        hidden=torch.cat([block.hidden for block in blocks], dim=1),
        valid=torch.cat([block.valid for block in blocks], dim=1),
        visible_to_suffix=torch.cat([block.valid & block.visible_to_suffix for block in blocks], dim=1),
        groups=torch.cat([_group_starts(block) for block in blocks]).cumsum(dim=0),
        spans=spans,
        target_blocks=tuple(block for block in blocks if block.targets is not None),
    )


def _group_starts(block: Block) -> Tensor:
    """Return which tokens start a group, (L,) bool, created on the device: a copy from the host would synchronise."""
    indices = torch.arange(block.hidden.shape[1], device=block.hidden.device)
    return {"continue": indices < 0, "bidirectional": indices == 0, "causal": indices >= 0}[block.attention]


def gather_tokens(hidden: Tensor, indices: Tensor) -> Tensor:
    """Gather hidden states (B, P, W) at `indices` (B, L): (B, L, W)."""
    return hidden.gather(1, indices[..., None].expand(-1, -1, hidden.shape[-1]))
