"""Losses and sampling of OpenTau's policies, written from the facts of its public source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def flow_errors(velocity: Tensor, target: Tensor, is_pad: Tensor, dims: Tensor) -> Tensor:
    """Return the squared errors (B, N, A), 0 past the end of an episode and in dimensions that a dataset lacks."""
    return (velocity - target).square() * (~is_pad[:, :, None] & dims[:, None, :])


def flow_term(errors: Tensor, is_pad: Tensor, dims: Tensor) -> Tensor:
    """Return the mean over all valid elements of the batch."""
    return errors.sum() / ((~is_pad[:, :, None] & dims[:, None, :]).sum() + 1e-8)


def token_errors(logits: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return the cross-entropies (B, L), 0 where a token is padding."""
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none") * valid


def text_term(errors: Tensor) -> Tensor:
    """Return the mean over all positions, padding included."""
    return errors.mean()


def sample(velocity: Callable[[Tensor, Tensor], Tensor], noise: Tensor, steps: int) -> Tensor:
    """Integrate from time 1 in steps of -1 / steps, as long as half a step of time is left."""
    x_t, time = noise.clone(), torch.tensor(1.0)
    while time >= 0.5 / steps:
        x_t = x_t - velocity(x_t, time.expand(len(noise))) / steps
        time = time - 1 / steps
    return x_t


def return_bin(remaining_steps: int, longest: int, bins: int) -> int:
    """Return the bin of a successful episode's return, which is minus the remaining steps over the longest number of steps."""
    return int((-remaining_steps / longest + 1) * (bins - 1))


def expected_value(logits: Tensor) -> Tensor:
    """Return the mean (B,) of the middles of equal bins over [-1, 0]."""
    bins = logits.shape[-1]
    edges = torch.linspace(-1, 0, bins + 1)
    return logits.softmax(dim=-1) @ ((edges[1:] + edges[:-1]) / 2)
