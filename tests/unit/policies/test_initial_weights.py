"""Weights of new policies: matrices have the scale of the published code, modulations are closed, and norms change nothing."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.registry.policies import PACKAGE
from tests.support.policy_batches import build

if TYPE_CHECKING:
    from collections.abc import Callable

NETWORKS = ("pi0", "pi05_mem", "pi06", "value", "vitra", "cosmos_droid")


def torch_default(outputs: int, inputs: int) -> float:
    return (3 * inputs) ** -0.5


def xavier(outputs: int, inputs: int) -> float:
    return (2 / (outputs + inputs)) ** 0.5


def by_inputs(outputs: int, inputs: int) -> float:
    return inputs**-0.5


# Standard deviations by policy and name: the first pattern that matches counts.
SCALES: dict[str, float | Callable[[int, int], float]] = {
    r".*\.modulation\.weight|vitra dit\.action_out\.weight": 0.0,
    r".* model\.vision\.layers\..*|vitra dit\.layers\..*": xavier,
    r".* model\.vision\.position|vitra dit\.position|cosmos_droid action_modality\.weight": by_inputs,
    r"cosmos_droid action_in\.weight\.weight": 32**-0.5,
    r"cosmos_droid action_out\.weight\.weight": 64**-0.5,
    r"cosmos_droid (latent|time)_.*": by_inputs,
    r".* (discrete\.embedding|token)\.weight": 1.0,
    r".* model\.(layers|vocabulary|projector\.projection)\b.*|.* discrete\.head\.weight": 0.02,
    r"vitra (dit|field_of_view|cognition)\b.*": 0.02,
    r".* (model\.vision\.patches|model\.projector|\w*head|action_in|action_out|state_in|time_in|time_out|time\.\w+)\.weight": (
        torch_default
    ),
}
ZERO_BIASES = r".* model\.vision\.layers\..*|vitra dit\..*|cosmos_droid .*|.*\.modulation\.bias"


def rms_norms(policy: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the RMS norms of a policy by name.

    Policies are imported again where the folders of policies change, so that a class imported above may be another one.
    """
    rms_norm = sys.modules[f"{PACKAGE}._layers.nn.norms"].RMSNorm
    norms = {name: module for name, module in policy.named_modules() if isinstance(module, rms_norm)}
    assert norms
    return norms


@pytest.mark.parametrize("name", NETWORKS)
def test_new_matrices_have_the_scale_of_the_published_code(name):
    """An expert, a head and a diffusion transformer are trained from these values."""
    policy = build(name)
    norms = {*rms_norms(policy)}
    norms |= {prefix for prefix, module in policy.named_modules() if isinstance(module, torch.nn.LayerNorm)}
    biases = {key for key, _ in policy.named_parameters() if key.endswith("bias") or "bias.weight" in key}
    for key, parameter in policy.named_parameters():
        if key in biases or key.rpartition(".")[0] in norms:
            continue
        scale = next(scale for pattern, scale in SCALES.items() if re.fullmatch(pattern, f"{name} {key}"))
        if callable(scale):
            scale = scale(parameter.shape[0], parameter[0].numel())
        spread = 4 * (2 * parameter.numel()) ** -0.5  # four standard errors of a standard deviation
        assert parameter.std().item() == pytest.approx(scale, rel=spread), key
    for key in biases:
        if re.fullmatch(ZERO_BIASES, f"{name} {key}") and "patches" not in key:
            assert not policy.get_parameter(key).any(), key


@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_norm_multiplies_by_one(name):
    for key, module in rms_norms(build(name)).items():
        assert torch.equal(module.weight, torch.full_like(module.weight, 0.0 if module.unit else 1.0)), key
