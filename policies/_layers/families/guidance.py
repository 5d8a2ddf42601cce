"""Guidance of denoising by a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def classifier_free_guidance(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Extrapolate from the unconditional towards the conditional prediction; a scale of 1 is no guidance (arXiv:2207.12598)."""
    return conditional + (scale - 1) * (conditional - unconditional)
