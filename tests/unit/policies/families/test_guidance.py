"""Guidance of denoising."""

from __future__ import annotations

import torch
from benchbox_policies._layers.families.guidance import classifier_free_guidance


def test_guidance_extrapolates_from_the_unconditional_prediction():
    conditional, unconditional = torch.randn(2, 3, 4)
    assert torch.equal(classifier_free_guidance(conditional, unconditional, 1.0), conditional)
    torch.testing.assert_close(classifier_free_guidance(conditional, unconditional, 0.0), unconditional)
    torch.testing.assert_close(
        classifier_free_guidance(conditional, unconditional, 5.0), unconditional + 5 * (conditional - unconditional)
    )
