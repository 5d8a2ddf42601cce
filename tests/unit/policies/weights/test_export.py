"""Weights of pi0 and pi05 are exported under the names that openpi and LeRobot read."""

from __future__ import annotations

import sys

import pytest
import torch
from benchbox_policies._layers.weights.export import published_state_dict
from benchbox_policies._layers.weights.published import load_published
from safetensors.torch import save_file

from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, policy_entry
from tests.support.policy_batches import POLICIES, build
from tests.support.published_weights import PUBLISHED, PUBLISHED_LAYERS, UNUSED_HEAD, table

SIZES = {"pi0": ("tiny", "full"), "pi05": ("tiny_flow", "full_flow")}


@pytest.mark.parametrize("policy", SIZES)
def test_a_full_policy_is_exported_with_the_published_names_and_shapes(policy):
    with torch.device("meta"):
        exported = published_state_dict(build(policy, SIZES[policy][1]))
        expected = {name: shape for name, (_, shape) in table(policy, PUBLISHED, PUBLISHED_LAYERS).items()}
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == expected | {UNUSED_HEAD: (257152, 1024)}


@pytest.mark.parametrize("policy", SIZES)
def test_an_exported_file_loads_into_the_same_policy_with_other_weights(tmp_path, policy):
    exported = build(policy, SIZES[policy][0])
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.normal_()
    save_file(published_state_dict(exported), tmp_path / "model.safetensors")
    imported = build(policy, SIZES[policy][0])
    loaded = load_published(imported, tmp_path)
    for name, parameter in exported.named_parameters():
        assert torch.equal(imported.get_parameter(name), parameter), name
    assert (loaded.missing, loaded.unexpected) == ((), (UNUSED_HEAD,))


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"pi0"}))
def test_policies_that_the_projects_do_not_have_are_refused_in_a_line(policy):
    """Among them pi05 with FAST tokens, whose expert reads another prompt than theirs."""
    with pytest.raises(UnsupportedError, match="cannot be exported: openpi and LeRobot have no weights for its ") as raised:
        published_state_dict(build(policy))
    assert "\n" not in str(raised.value)


def test_a_policy_with_the_layers_of_pi05_and_another_state_is_refused():
    build("pi05_mem")
    preset = dict(policy_entry("pi05_mem").presets["tiny"], fast_tokens=0, response_tokens=0, knowledge_insulation=False)
    policy = sys.modules[f"{PACKAGE}.pi05_mem.policy"].build(preset, Axes())
    with pytest.raises(UnsupportedError, match="no weights for its action_in, action_out, state_in, time"):
        published_state_dict(policy)
