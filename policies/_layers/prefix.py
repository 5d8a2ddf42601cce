"""A prefix as a list of blocks, from which masks and positions follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Attention = Literal["continue", "bidirectional", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A run of tokens.

    `continue` lets it and the block before it see one another, `bidirectional` starts a group that sees itself and what came
    before, `causal` makes each token a group of its own. What the suffix must not read has `readable` False.
    """

    name: str
    hidden: Tensor  # (B, L, W)
    valid: Tensor  # (B, L) bool
    attention: Attention
    readable: bool = True


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks laid end to end. A query sees a key iff the key's group is not later than its own and both are valid."""

    hidden: Tensor  # (B, P, W)
    valid: Tensor  # (B, P) bool
    readable: Tensor  # (B, P) bool: valid, and the suffix may read it
    groups: Tensor  # (P,) int64: cumulative count of groups
    spans: dict[str, slice]

    @property
    def positions(self) -> Tensor:
        """(B, P) int64; padding takes no position of its own."""
        return self.valid.long().cumsum(dim=1) - 1

    def visible(self) -> Tensor:
        """(B, P, P) bool. Padding sees itself and nobody sees it: a row without any key is undefined in some fused kernels."""
        ordered = self.groups[None, :] <= self.groups[:, None]
        both = self.valid[:, :, None] & self.valid[:, None, :]
        return (ordered & both) | torch.eye(len(self.groups), dtype=torch.bool, device=self.groups.device)

    def visible_to_suffix(self, length: int) -> Tensor:
        """(B, S, P + S) bool for a bidirectional suffix of that length: the readable prefix, and all of the suffix."""
        visible = F.pad(self.readable, (0, length), value=True)
        return visible[:, None].expand(-1, length, -1)

    def suffix_positions(self, length: int) -> Tensor:
        """(B, S) int64, counted from the end of what the suffix can read: inference has no other prefix."""
        return self.readable.sum(dim=1, keepdim=True) + torch.arange(length, device=self.valid.device)

    def predictors(self, name: str) -> Tensor:
        """(B, L) int64: for each token of a causal block, where in the prefix the last valid token before it stands."""
        span = self.spans[name]
        places = torch.arange(self.valid.shape[1], device=self.valid.device)
        last = torch.where(self.valid, places, 0).cummax(dim=1).values
        return last[:, span.start - 1 : span.stop - 1]


def lay(blocks: Sequence[Block]) -> Prefix:
    """Lay blocks end to end."""
    spans: dict[str, slice] = {}
    offset = 0
    for block in blocks:
        length = block.hidden.shape[1]
        spans[block.name] = slice(offset, offset + length)
        offset += length
    return Prefix(
        hidden=torch.cat([block.hidden for block in blocks], dim=1),
        valid=torch.cat([block.valid for block in blocks], dim=1),
        readable=torch.cat([block.valid & block.readable for block in blocks], dim=1),
        groups=torch.cat([_starts(block) for block in blocks]).cumsum(dim=0),
        spans=spans,
    )


def _starts(block: Block) -> Tensor:
    """(L,) bool: which tokens open a group. Made where the tokens are: a copy from the host would make the device wait."""
    places = torch.arange(block.hidden.shape[1], device=block.hidden.device)
    return {"continue": places < 0, "bidirectional": places == 0, "causal": places >= 0}[block.attention]


def select(hidden: Tensor, places: Tensor) -> Tensor:
    """Hidden states (B, P, W) at `places` (B, L): (B, L, W)."""
    return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
