"""Loss terms as sums and counts per sample, combined into one training loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.registry.contracts import Losses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ..sequence.token_sequence import TokenSequence


def sum_valid(losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses summed over the valid tokens of each sample, and their number: two (B,) float32.

    Args:
        losses: (B, L) float32, of each token.
        valid: (B, L) bool. With no valid token the sum is exactly 0, and so is its gradient.
    """
    return torch.where(valid, losses, 0.0).sum(dim=1), valid.sum(dim=1).float()


def text_losses(
    sequence: TokenSequence, names: Sequence[str], token_losses: Callable[[str, Tensor], Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the token losses of each block with targets, by name, as sums and counts per sample.

    `token_losses` returns the cross-entropies (B, L) of a block, by its name and its targets (B, L).

    Those of `names` that are not in the sequence have a sum and a count of 0, so that every step has the same terms.
    """
    zero = sequence.valid.new_zeros(len(sequence.valid), dtype=torch.float32)
    losses = dict.fromkeys(names, (zero, zero))
    for block in sequence.target_blocks:
        assert block.targets is not None
        losses[block.name] = sum_valid(token_losses(block.name, block.targets), block.valid)
    return losses


def combine_losses(
    terms: dict[str, tuple[Tensor, Tensor]], *, per_sample: bool, weights: Mapping[str, Tensor] | None = None
) -> Losses:
    """Add the terms, each the mean over samples of sum / count; a sample with a count of 0 contributes 0 to this mean.

    The reported parts are means over the samples with a count, so that samples without the term do not dilute them.

    OpenTau's terms are not means of means: its flow error is divided by the number of valid elements of the whole batch, and
    its cross-entropies by the number of all positions, padding included. Here the loss of a sample does not depend on the
    others in its batch, nor a cross-entropy on the length to which texts are padded. On the mixed batch of
    `tests/parity/test_opentau.py` OpenTau's flow term differs from ours by 0.7%, and its FAST term is 44% smaller.

    Args:
        terms: sum and count of each term, both (B,).
        per_sample: whether to return sums and counts, and the loss of each sample, too.
        weights: (B,) of each term, of the total only: the reported parts and sums are not weighted.
    """
    ratios = {name: total / count.clamp(min=1.0) for name, (total, count) in terms.items()}
    weighted = ratios if weights is None else {name: weights[name] * ratio for name, ratio in ratios.items()}
    counts = {name: (count > 0).sum().float() for name, (_, count) in terms.items()}
    return Losses(
        total=torch.stack([ratio.mean() for ratio in weighted.values()]).sum(),
        parts={name: ratio.detach().sum() / counts[name].clamp(min=1.0) for name, ratio in ratios.items()},
        per_sample={name: (total.detach(), count) for name, (total, count) in terms.items()} if per_sample else None,
        counts=counts,
        sample_losses=torch.stack([ratio.detach() for ratio in weighted.values()]).sum(dim=0) if per_sample else None,
    )
