"""Cross-entropy of an output head, without the logits of all tokens in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Logits that exist at a time: 256 MiB in float32. With a vocabulary of 257,152 these are 260 tokens, enough for a GPU to spend
# more time on the product than on reading the weight.
MAX_LOGITS = 2**26


def head_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of every token under the logits `x @ weight.T`, in float32: (B, L).

    Forward computes the logits chunk by chunk and keeps none of them; backward computes them again. The product is in the dtype
    of `weight`, or in that of autocast, and everything after it in float32. The gradient of `weight` is summed over chunks in
    the dtype of the product.

    Args:
        x: (B, L, W).
        weight: (V, W).
        targets: (B, L) int64.
    """
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)  # torch raises for meta
    dtype = torch.get_autocast_dtype(kind) if autocast else weight.dtype
    flat = x.to(dtype).flatten(0, 1)
    losses: Any = _HeadCrossEntropy.apply(flat, weight.to(dtype), targets.flatten())
    return losses.view_as(targets)


class _HeadCrossEntropy(torch.autograd.Function):
    """x (N, W), weight (V, W), targets (N,) -> losses (N,) float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_sums, scores = [], []
        for rows in _chunks(x, weight):
            logits = F.linear(x[rows], weight).float()
            log_sums.append(logits.logsumexp(dim=1))
            scores.append(logits.gather(1, targets[rows, None]).squeeze(1))
        log_sum = torch.cat(log_sums)
        ctx.save_for_backward(x, weight, targets, log_sum)
        return log_sum - torch.cat(scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, targets, log_sum = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        x_gradients: list[Tensor] = []
        weight_gradient: Tensor | None = None
        for rows in _chunks(x, weight):
            with torch.enable_grad():  # as activation checkpointing does: what counts operations sees a recomputation
                logits = F.linear(x[rows].detach(), weight.detach()).float()
            # d loss / d logits = softmax(logits) - one-hot(target)
            slope = logits.sub_(log_sum[rows, None]).exp_()
            slope.scatter_add_(1, targets[rows, None], slope.new_full((len(slope), 1), -1.0))
            product_slope = slope.mul_(gradient[rows, None]).to(weight.dtype)
            if needs_x:
                x_gradients.append(product_slope @ weight)
            if needs_weight and weight_gradient is None:
                weight_gradient = product_slope.T @ x[rows]
            elif weight_gradient is not None:
                torch.addmm(weight_gradient, product_slope.T, x[rows], out=weight_gradient)
        return torch.cat(x_gradients) if needs_x else None, weight_gradient, None


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    rows = max(1, MAX_LOGITS // len(weight))
    return (slice(start, start + rows) for start in range(0, len(x), rows))
