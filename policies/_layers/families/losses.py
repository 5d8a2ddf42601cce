"""Sums and counts of each sample, combined into one training loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from benchbox.registry.contracts import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ..sequence.token_sequence import TokenSequence


def token_loss(logits: Tensor, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the valid tokens of each sample, and their number: two (B,) float32.

    Args:
        logits: (B, L, V).
        tokens: (B, L) int64.
        valid: (B, L) bool. With no valid token the sum is exactly 0, and so is its gradient.
    """
    loss = F.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none")
    return torch.where(valid, loss, 0.0).sum(dim=1), valid.sum(dim=1).float()


def text_losses(stream: TokenSequence, names: Sequence[str], scores: Callable[[str], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The token loss of each learned block of a stream, and of those of `names` that are not in it: a sum and a count of 0, so
    that every step has the same terms.
    """
    nothing = stream.valid.new_zeros(len(stream.valid), dtype=torch.float32)
    losses = dict.fromkeys(names, (nothing, nothing))
    for block in stream.learned:
        assert block.targets is not None
        losses[block.name] = token_loss(scores(block.name), block.targets, block.valid)
    return losses


def combine_losses(terms: dict[str, tuple[Tensor, Tensor]], *, per_sample: bool, shares: Mapping[str, Tensor] | None = None) -> Losses:
    """Add the terms, each the mean over samples of sum / count; a sample that counts nothing contributes 0 to its mean.

    With `shares` (B,) of each term the total is of each sample so much of it; the parts and sums that are reported stay whole.
    """
    ratios = {name: total / count.clamp(min=1.0) for name, (total, count) in terms.items()}
    added = ratios if shares is None else {name: shares[name] * ratio for name, ratio in ratios.items()}
    return Losses(
        total=torch.stack([ratio.mean() for ratio in added.values()]).sum(),
        parts={name: ratio.detach().mean() for name, ratio in ratios.items()},
        per_sample={name: (total.detach(), count) for name, (total, count) in terms.items()} if per_sample else None,
    )
