"""Attention masks, as dense tensors and as block masks of FlexAttention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import AttentionKernel

_BLOCK = 128  # side of a block of scores, FlexAttention's default
_BEYOND = 2**40  # more than any group or position


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
        """Return the same mask for FlexAttention, which computes only blocks of scores that are not fully masked.

        Which blocks these are follows from the least and the largest group and position of every block: no dense mask is built.
        With a window, blocks that are fully masked may be among them.
        """
        from torch.nn.attention.flex_attention import BlockMask

        def mask_mod(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            mask = (self.key_groups[key] <= self.query_groups[query]) & (
                self.query_valid[batch, query] & self.key_valid[batch, key]
            )
            if window is not None:
                mask = mask & ((self.query_positions[batch, query] - self.key_positions[batch, key]).abs() < window)
            return mask | (query + self.query_offset == key)

        visible, full = self._blocks(window)
        return BlockMask.from_kv_blocks(
            *_indices(visible & ~full),
            *_indices(full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(len(self.query_groups), len(self.key_groups)),
        )

    def _blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return, as (B, Q blocks, K blocks) bool, where a query may attend to a key, and where all queries do to all keys."""
        queries = _Extremes.of(self.query_groups.expand_as(self.query_valid), self.query_valid)
        keys = _Extremes.of(self.key_groups.expand_as(self.key_valid), self.key_valid)
        visible = keys.least[:, None, :] <= queries.most[:, :, None]
        full = (keys.most[:, None, :] <= queries.least[:, :, None]) & queries.all_valid[:, :, None] & keys.all_valid[:, None, :]
        if window is not None:
            before = _Extremes.of(self.query_positions, self.query_valid)
            after = _Extremes.of(self.key_positions, self.key_valid)
            visible &= (before.least[:, :, None] - after.most[:, None, :] < window) & (
                after.least[:, None, :] - before.most[:, :, None] < window
            )
            full &= (before.most[:, :, None] - after.least[:, None, :] < window) & (
                after.most[:, None, :] - before.least[:, :, None] < window
            )
        return visible | self._own_blocks(), full

    def _own_blocks(self) -> Tensor:
        """Return, as (Q blocks, K blocks) bool, which blocks have the key of one of their queries."""
        device = self.key_groups.device
        first = torch.arange(0, len(self.query_groups), _BLOCK, device=device)
        last = (first + _BLOCK).clamp(max=len(self.query_groups)) - 1
        blocks = torch.arange(math.ceil(len(self.key_groups) / _BLOCK), device=device)
        own_first, own_last = ((index + self.query_offset) // _BLOCK for index in (first, last))
        return (own_first[:, None] <= blocks) & (blocks <= own_last[:, None])


@dataclass(frozen=True, slots=True)
class _Extremes:
    """Least and largest value of the valid tokens of each block, as (B, blocks), and whether all of its tokens are valid."""

    least: Tensor
    most: Tensor
    all_valid: Tensor

    @classmethod
    def of(cls, values: Tensor, valid: Tensor) -> Self:
        """Return those of values (B, L). The last block may have fewer tokens, and is then not all valid."""
        padding = (0, -values.shape[1] % _BLOCK)
        blocks, valid = (functional.pad(tensor, padding).unflatten(1, (-1, _BLOCK)) for tensor in (values, valid))
        least, most = (blocks.masked_fill(~valid, beyond) for beyond in (_BEYOND, -_BEYOND))
        return cls(least.amin(dim=-1), most.amax(dim=-1), valid.all(dim=-1))


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks a row of (B, Q blocks, K blocks) has, and its columns, those first; both with one head."""
    counts, columns = blocks.sum(dim=-1), blocks.int().argsort(dim=-1, descending=True, stable=True)
    return counts[:, None].int(), columns[:, None].int()
