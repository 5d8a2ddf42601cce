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

    from benchbox.registry.contracts import AttentionKernel


_FLEX_VARIANTS = 128


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | BlockMask | None,
    kernel: AttentionKernel,
    softcap: float | None = None,
) -> Tensor:
    """Compute softmax(query key^T / sqrt(D)) value.

    Args:
        query: (B, H, Q, D).
        key: (B, G, K, D) with G dividing H: each key head is shared by H / G query heads.
        value: (B, G, K, D).
        mask: the result of `AttentionMask.build` for the kernel: (B, Q, K) bool, True where the query attends to the key, or a
            block mask for `flex`; or None when every query attends to every key. The result of a query without any key is
            finite and meaningless.
        kernel: `eager` computes scores and their softmax in float32; `sdpa` uses torch's fused kernels; `flex` is torch's
            FlexAttention, which skips fully masked blocks, and `sdpa` where there is no mask.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2. `sdpa` has no such kernel: eager runs instead.

    Returns:
        (B, Q, H * D).
    """
    if mask is not None and not isinstance(mask, Tensor):
        with record_function("flex_attention"):
            output = _flex_attention(query.device.type)(
                query,
                key,
                value,
                block_mask=mask,
                score_mod=None if softcap is None else _softcap_mod(softcap),
                enable_gqa=True,
            )
        return output.transpose(1, 2).flatten(2)
    heads = query.shape[1]
    key, value = repeat_kv(key, heads), repeat_kv(value, heads)
    head_mask = None if mask is None else mask[:, None]  # (B, 1, Q, K)
    if kernel == "eager" or softcap is not None:
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if head_mask is not None:
            scores = scores.masked_fill(~head_mask, torch.finfo(scores.dtype).min)
        output = torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)
    else:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=head_mask)
    return output.transpose(1, 2).flatten(2)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat the G key or value heads to `heads`; a view when G is 1. (`enable_gqa` would rule out the masked CUDA kernels.)"""
    batch, groups, length, width = x.shape
    if groups == heads:
        return x
    return x[:, :, None].expand(batch, groups, heads // groups, length, width).reshape(batch, heads, length, width)


@cache
def _flex_attention(device: str) -> Callable[..., Tensor]:
    """Return FlexAttention, compiled except on a CPU.

    It is one kernel only once it is compiled. On a CPU it has no backward, and its forward runs uncompiled.

    Every length of a sequence is compiled, once per window, for the prefix and for the expert. A policy with three optional
    blocks has 16 such variants. Beyond torch's limit of 8 it would run uncompiled, with all scores in memory and no error.
    """
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":
        return flex_attention
    config.recompile_limit = max(config.recompile_limit, _FLEX_VARIANTS)
    return torch.compile(flex_attention, dynamic=False)


@cache
def _softcap_mod(softcap: float) -> Callable[..., Tensor]:
    """Return the same function for the same cap: a new function would be compiled again."""

    def score_mod(score: Tensor, *_: Any) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, L, H * D) to (B, H, L, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
