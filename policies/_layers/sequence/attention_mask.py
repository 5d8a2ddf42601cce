"""Attention masks, as dense tensors and as block masks of FlexAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import AttentionKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMask:
    """A query attends to a key iff the key's group is not later than the query's and both are valid.

    A padding token attends to itself only, because a row without any key is undefined in some fused kernels. Queries are among
    the keys: query i is key `query_offset + i`.
    """

    query_groups: Tensor  # (Q,) int64
    key_groups: Tensor  # (K,) int64
    query_valid: Tensor  # (B, Q) bool
    key_valid: Tensor  # (B, K) bool
    query_positions: Tensor  # (B, Q) int64
    key_positions: Tensor  # (B, K) int64
    query_offset: int = 0

    def build(self, kernel: AttentionKernel, window: int | None = None) -> Tensor | BlockMask:
        """Return the mask in the form that `attend` takes for this kernel.

        Args:
            kernel: `flex` gets a block mask, any other kernel a dense mask.
            window: sliding window: a query attends only to keys less than this many positions away.
        """
        return self.block_mask(window) if kernel == "flex" else self.dense(window)

    def dense(self, window: int | None = None) -> Tensor:
        """Return the mask as (B, Q, K) bool, True where the query attends to the key."""
        indices = torch.arange(len(self.key_groups), device=self.key_groups.device)
        mask = (self.key_groups[None, :] <= self.query_groups[:, None]) & (
            self.query_valid[:, :, None] & self.key_valid[:, None, :]
        )
        if window is not None:
            mask &= (self.query_positions[:, :, None] - self.key_positions[:, None, :]).abs() < window
        return mask | (indices[self.query_offset : self.query_offset + len(self.query_groups), None] == indices)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """Return the same mask for FlexAttention, which computes only blocks of scores that are not fully masked."""
        from torch.nn.attention.flex_attention import create_block_mask

        def mask_mod(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            mask = (self.key_groups[key] <= self.query_groups[query]) & (
                self.query_valid[batch, query] & self.key_valid[batch, key]
            )
            if window is not None:
                mask = mask & ((self.query_positions[batch, query] - self.key_positions[batch, key]).abs() < window)
            return mask | (query + self.query_offset == key)

        (batch, queries), keys = self.query_valid.shape, self.key_valid.shape[1]
        return create_block_mask(mask_mod, batch, None, queries, keys, device=str(self.key_groups.device))
