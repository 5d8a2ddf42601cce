"""Scaled dot-product attention with grouped keys and values, by one of two kernels that agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

Kernel = Literal["eager", "sdpa"]


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, kernel: Kernel) -> Tensor:
    """Softmax(query key' / sqrt(D)) value.

    Args:
        query: (B, H, Q, D).
        key: (B, G, K, D) with G dividing H: each key head serves H / G query heads.
        value: (B, G, K, D).
        visible: (B, Q, K) bool, True where the query sees the key, or None when every query sees every key. A query that sees
            no key gets a finite, meaningless answer.
        kernel: `eager` forms the scores and their softmax in float32; `sdpa` leaves them to torch's fused kernels.

    Returns:
        (B, Q, H * D).
    """
    heads = query.shape[1]
    key, value = _serve(key, heads), _serve(value, heads)
    mask = None if visible is None else visible[:, None]  # (B, 1, Q, K)
    if kernel == "sdpa":
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    else:
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        attended = torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
    return attended.transpose(1, 2).flatten(2)


def _serve(x: Tensor, heads: int) -> Tensor:
    """Repeat the G key or value heads to `heads`; a view when G is 1. (`enable_gqa` would rule out the masked CUDA kernels.)"""
    batch, groups, length, width = x.shape
    if groups == heads:
        return x
    return x[:, :, None].expand(batch, groups, heads // groups, length, width).reshape(batch, heads, length, width)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H * D) to (B, H, L, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
