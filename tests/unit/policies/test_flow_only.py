"""Flow policies without FAST tokens: pi05 as openpi and LeRobot train it, and every other policy that has such tokens."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
import torch

from benchbox.data.text.prompt import ByteTokenizer, encode_prompt
from benchbox.errors import ConfigurationError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, policy_entry
from tests.support.policy_batches import build, build_on_meta, gradients, make_batch

WITH_FAST_TOKENS = ("pi05", "pi05_mem", "pi06", "pi07_low_level", "pi07_paligemma")


def test_flow_only_pi05_reads_images_and_a_prompt_that_ends_with_action():
    policy = build(size="tiny_flow")
    spec = policy.batch_spec()
    tokens, mask = encode_prompt(ByteTokenizer(spec.text_vocab), spec, "stack", torch.tensor([3, 7]).numpy())
    assert ByteTokenizer(spec.text_vocab).decode(tokens[mask].tolist()) == "Task: stack, State: 3 7;\nAction: "
    prefixes = []
    policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    parts = policy(make_batch(spec, 2)).parts
    assert list(prefixes[0].spans) == ["images", "prompt"]
    assert prefixes[0].groups.unique().tolist() == [1], "all of it attends to all of it"
    assert parts.keys() == {"flow"}


def test_the_flow_loss_trains_the_backbone_of_flow_only_pi05():
    torch.manual_seed(0)
    policy = build(size="tiny_flow")
    batch = make_batch(policy.batch_spec(), 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):  # the gates of a new expert are closed
        policy(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy(batch).total.backward()
    assert gradients(policy)["model.layers.0.backbone.query.weight"].any()


def test_full_flow_is_full_without_fast_tokens_response_and_insulation():
    full, flow = build_on_meta("pi05", "full"), build_on_meta("pi05", "full_flow")
    sizes = {name: tuple(parameter.shape) for name, parameter in full.named_parameters()}
    own = {name: tuple(parameter.shape) for name, parameter in flow.named_parameters()}
    missing = sizes.keys() - own.keys()
    assert own.items() <= sizes.items()
    assert {"discrete.embedding.weight", "discrete.head.weight"} <= missing
    changed = {"fast_tokens": 0, "response_tokens": 0, "knowledge_insulation": False}
    # Not the objects: a test with another folder of policies may have imported the module anew between the two.
    assert asdict(flow.config) == asdict(full.config) | changed


def build_changed(name: str, **changes: object):
    """Build a policy from its preset `tiny` with other values."""
    build(name)
    module = sys.modules[f"{PACKAGE}.{name}.policy"]
    return module.build({**policy_entry(name).presets["tiny"], **changes}, Axes())


@pytest.mark.parametrize("name", WITH_FAST_TOKENS)
def test_every_policy_with_fast_tokens_trains_and_acts_without_them(name):
    policy = build_changed(name, fast_tokens=0, knowledge_insulation=False)
    batch = make_batch(policy.batch_spec(), 2)
    losses = policy(batch)
    losses.total.backward()
    assert "flow" in losses.parts
    assert not [part for part in losses.parts if part.startswith("fast")]
    actions = policy.select_actions(batch)
    assert actions.shape == batch["action"].shape
    assert actions.isfinite().all()


@pytest.mark.parametrize("name", WITH_FAST_TOKENS)
def test_an_insulated_backbone_that_no_text_trains_is_refused(name):
    """No loss would reach it."""
    context = name.startswith("pi07")  # its response is read, not predicted
    with pytest.raises(ConfigurationError, match=r"preset\.knowledge_insulation: .* it would learn nothing; set it to false"):
        build_changed(name, fast_tokens=0, **({} if context else {"response_tokens": 0}))


@pytest.mark.parametrize("name", ["pi07_low_level", "pi07_paligemma", "pi07_high_level"])
def test_policies_that_always_read_a_response_refuse_one_without_tokens(name):
    with pytest.raises(ConfigurationError, match=r"preset\.response_tokens: .*greater than 0"):
        build_changed(name, response_tokens=0)


MODES = {"pi0": "mean_std", "pi05": "quantile", "pi05_mem": "quantile", "pi07_low_level": "mean_std"}


@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_states_and_actions_are_normalised_as_the_peers_and_their_weights_do(name, mode):
    spec = build(name).batch_spec()
    assert (spec.state_normalisation, spec.action_normalisation) == (mode, mode)
