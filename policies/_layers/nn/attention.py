"""Scaled dot-product attention with grouped keys and values, by one of three kernels that agree."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.attention.flex_attention import BlockMask

    from benchbox.registry.contracts import Kernel


def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | BlockMask | None, kernel: Kernel, softcap: float | None = None
) -> Tensor:
    """Softmax(query key' / sqrt(D)) value.

    Args:
        query: (B, H, Q, D).
        key: (B, G, K, D) with G dividing H: each key head serves H / G query heads.
        value: (B, G, K, D).
        visible: what `AttentionMask.mask` gives for the kernel: (B, Q, K) bool, True where the query sees the key, or a block mask for
            `flex`; or None when every query sees every key. A query that sees no key gets a finite, meaningless answer.
        kernel: `eager` forms the scores and their softmax in float32; `sdpa` leaves them to torch's fused kernels; `flex` is
            torch's FlexAttention, which skips blocks of the mask that nobody sees, and `sdpa` where there is no mask.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2. `sdpa` has no such kernel: eager runs instead.

    Returns:
        (B, Q, H * D).
    """
    if visible is not None and not isinstance(visible, Tensor):
        with record_function("flex_attention"):
            attended = _flex(query.device.type)(
                query, key, value, block_mask=visible, score_mod=None if softcap is None else _capped(softcap), enable_gqa=True
            )
        return attended.transpose(1, 2).flatten(2)
    heads = query.shape[1]
    key, value = repeat_kv(key, heads), repeat_kv(value, heads)
    mask = None if visible is None else visible[:, None]  # (B, 1, Q, K)
    if kernel == "eager" or softcap is not None:
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        attended = torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
    else:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return attended.transpose(1, 2).flatten(2)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat the G key or value heads to `heads`; a view when G is 1. (`enable_gqa` would rule out the masked CUDA kernels.)"""
    batch, groups, length, width = x.shape
    if groups == heads:
        return x
    return x[:, :, None].expand(batch, groups, heads // groups, length, width).reshape(batch, heads, length, width)


@cache
def _flex(device: str) -> Callable[..., Tensor]:
    """FlexAttention is one kernel only once it is compiled. On a CPU it has no backward; its forward is interpreted there."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """One function for each cap: a new one would be compiled again."""

    def capped(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H * D) to (B, H, L, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
