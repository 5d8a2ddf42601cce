"""Who sees whom in attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """A query sees a key iff the key's group is not later than its own and both are valid.

    Padding sees itself, and nobody sees it: a row without any key is undefined in some fused kernels. Queries are among the
    keys: query i is key `first + i`.
    """

    query_groups: Tensor  # (Q,) int64
    key_groups: Tensor  # (K,) int64
    query_valid: Tensor  # (B, Q) bool
    key_valid: Tensor  # (B, K) bool
    query_positions: Tensor  # (B, Q) int64
    key_positions: Tensor  # (B, K) int64
    first: int = 0

    def mask(self, kernel: Kernel, window: int | None = None) -> Tensor | BlockMask:
        """What `attend` takes. With a `window` a query sees keys less than that many positions away only."""
        return self.block_mask(window) if kernel == "flex" else self.dense(window)

    def dense(self, window: int | None = None) -> Tensor:
        """(B, Q, K) bool."""
        places = torch.arange(len(self.key_groups), device=self.key_groups.device)
        visible = (self.key_groups[None, :] <= self.query_groups[:, None]) & (
            self.query_valid[:, :, None] & self.key_valid[:, None, :]
        )
        if window is not None:
            visible &= (self.query_positions[:, :, None] - self.key_positions[:, None, :]).abs() < window
        return visible | (places[self.first : self.first + len(self.query_groups), None] == places)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """The same for FlexAttention: which blocks of scores are worth computing."""
        from torch.nn.attention.flex_attention import create_block_mask

        def seen(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            visible = (self.key_groups[key] <= self.query_groups[query]) & (
                self.query_valid[batch, query] & self.key_valid[batch, key]
            )
            if window is not None:
                visible &= (self.query_positions[batch, query] - self.key_positions[batch, key]).abs() < window
            return visible | (query + self.first == key)

        (batch, queries), keys = self.query_valid.shape, self.key_valid.shape[1]
        return create_block_mask(seen, batch, None, queries, keys, device=str(self.key_groups.device))
