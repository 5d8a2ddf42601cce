from __future__ import annotations

import math
import sys
from collections import Counter

import pytest
import torch

from benchbox.errors import ConfigurationError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, policy_entry
from tests.support.policy_batches import build, build_on_meta, gradients, make_batch


def count(*modules: torch.nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def test_full_has_the_published_parameter_counts():
    policy = build_on_meta("pi05", "full")
    model = policy.model
    assert count(model.vision) == 412_442_352  # 412.4 M
    assert count(model.projector) == 2_361_344  # 2.36 M
    backbone = count(model.vocabulary, *(pair.backbone for pair in model.layers), model.norm)
    assert backbone == 2_508_531_712  # 2.5085 B; with tower and projector 2.9233 B
    assert count(*(pair.expert for pair in model.layers), model.expert_norm) == 427_932_672  # 427.9 M
    assert count(policy) == 3_361_824_528  # 3.36 B


def test_the_batch_spec_follows_preset_and_axes():
    spec = build(cams=3).batch_spec()
    assert (spec.cameras, spec.image_size, spec.horizon, spec.fast_vocab) == (3, (32, 32), 10, 512)
    assert spec.state_in_prompt


def test_images_and_prompt_are_one_group_and_every_later_token_is_its_own():
    policy = build(cams=2)
    prefixes = []
    policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    policy(make_batch(policy.batch_spec(), 1))
    together, causal = 2 * 16 + 128, len("Response: ") + 8 + len("Action: ") + 32
    assert prefixes[0].groups.tolist() == [1] * together + list(range(2, 2 + causal))
    assert list(prefixes[0].spans) == ["images", "prompt", "response cue", "response", "action cue", "fast"]
    for name, visible in (("response", True), ("action cue", False), ("fast", False)):
        assert prefixes[0].visible_to_suffix[:, prefixes[0].spans[name]].any() == visible, name


def test_acting_reads_what_the_expert_read_in_training(awake):
    """The prefix without "Action: " and FAST tokens, which train the backbone only."""
    policy, batch = awake()
    trained, acted = [], []
    policy.model.register_forward_pre_hook(lambda _, arguments: trained.append(arguments[0]))
    policy(batch)
    prefill = policy.model.prefill
    policy.model.prefill = lambda prefix: acted.append(prefix) or prefill(prefix)
    policy.select_actions(batch)
    assert list(acted[0].spans) == ["images", "prompt", "response cue", "response"]
    read = trained[0].visible_to_suffix.sum(dim=1)
    assert torch.equal(acted[0].valid.sum(dim=1), read)


def test_every_parameter_of_a_new_policy_is_in_the_graph_and_finite():
    policy = build()
    batch = make_batch(policy.batch_spec(), 2)
    batch["response_mask"][:] = False
    batch["fast_mask"][:] = False
    losses = policy(batch)
    losses.total.backward()
    assert losses.parts["response"] == losses.parts["fast"] == 0
    assert [name for name, gradient in gradients(policy).items() if gradient is None or not gradient.isfinite().all()] == []


def test_an_untrained_policy_has_the_losses_of_uniform_predictions():
    """Cross-entropy is near log(vocabulary), and the flow error near var(noise) + var(action), that of predicting zero."""
    policy = build()
    parts = policy(make_batch(policy.batch_spec(), 8)).parts
    assert parts["fast"] == pytest.approx(math.log(512), rel=0.05)
    assert parts["response"] == pytest.approx(math.log(384), rel=0.05)
    assert 1.0 < parts["flow"] < 3.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_masked_inputs_contribute_nothing(attention, awake):
    policy, batch = awake(attention=attention, cams=2)
    batch["image_mask"][0, :, 1] = False
    before = policy(batch).total
    changed = {key: value.clone() for key, value in batch.items()}
    changed["images"][0, :, 1] = 255 - changed["images"][0, :, 1]
    for name, tokens in (("prompt", 384), ("response", 384), ("fast", 512)):
        masked = ~changed[f"{name}_mask"]
        assert masked.any()
        changed[f"{name}_tokens"] = torch.where(masked, (changed[f"{name}_tokens"] + 7) % tokens, changed[f"{name}_tokens"])
    assert torch.equal(policy(changed).total, before)

    changed["image_mask"][0, :, 1] = True
    assert not torch.equal(policy(changed).total, before)


def test_only_the_last_frame_of_a_history_is_used(awake):
    policy, batch = awake()
    history = dict(batch)
    for name, past in (("images", 255 - batch["images"]), ("image_mask", ~batch["image_mask"])):
        history[name] = torch.cat((past, batch[name]), dim=1)
    assert torch.equal(policy(history).total, policy(batch).total)


def test_a_new_expert_layer_is_the_identity_because_its_gates_are_closed():
    policy = build()
    expert_states = []
    for pair in policy.model.layers:
        pair.register_forward_hook(lambda _, inputs, output: expert_states.append((inputs[1][0], output[1])))
    policy(make_batch(policy.batch_spec(), 2))
    assert len(expert_states) == 3
    assert all(torch.equal(before, after) for before, after in expert_states)


def test_only_valid_steps_and_dimensions_are_trained(awake):
    policy, batch = awake()
    target_only = {key: value.clone() for key, value in batch.items()}
    missing = batch["action_is_pad"][:, :, None] | ~batch["action_dim_mask"][:, None, :]
    # shift action and noise so that the network's input is unchanged and only the target changes
    time = batch["uniform"][:, :1, None] ** (1 / 1.5) * 0.999 + 0.001
    shift = torch.where(missing, 1.0, 0.0)
    target_only["action"] += shift * time
    target_only["noise"][:, 0] -= shift * (1 - time)
    torch.testing.assert_close(policy(target_only).total, policy(batch).total, rtol=1e-6, atol=0)


def test_images_prompt_response_and_state_text_reach_the_flow_and_discrete_actions_do_not(awake):
    policy, batch = awake()
    before = policy(batch).parts
    for name, reaches in (("images", True), ("prompt_tokens", True), ("response_tokens", True), ("fast_tokens", False)):
        changed = dict(batch)
        changed[name] = changed[name].flip(0)
        after = policy(changed).parts
        assert torch.equal(after["flow"], before["flow"]) != reaches, name
        assert not torch.equal(after["fast"], before["fast"]), name


@pytest.mark.parametrize("insulated", [True, False])
def test_knowledge_insulation_keeps_the_flow_loss_from_the_backbone(insulated):
    torch.manual_seed(0)
    preset = dict(policy_entry("pi05").presets["tiny"], knowledge_insulation=insulated)
    policy = _module().build(preset, Axes())
    batch = make_batch(policy.batch_spec(), 2)
    batch["response_mask"][:] = False
    batch["fast_mask"][:] = False
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):
        policy(batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy(batch).total.backward()
    roles = policy.parameter_roles()
    touched = {name for name, gradient in gradients(policy).items() if gradient.any()}
    assert any(roles[name].part == "backbone" for name in touched) != insulated
    assert any(roles[name].part == "head" for name in touched)


def test_in_evaluation_nothing_is_recomputed(awake):
    policy, batch = awake(checkpointing=True)
    policy.eval()
    calls: Counter[str] = Counter()
    policy.model.layers[0].backbone.query.register_forward_hook(lambda *_: calls.update(["query"]))
    policy(batch).total.backward()
    assert calls["query"] == 1


def test_asking_for_per_sample_losses_changes_no_bit_of_the_loss_and_they_add_up_to_it(awake):
    policy, batch = awake()
    plain, detailed = policy(batch), policy(batch, per_sample=True)
    assert plain.per_sample is None
    assert torch.equal(plain.total, detailed.total)
    for name, (total, number) in detailed.per_sample.items():
        assert total.shape == number.shape == (4,)
        torch.testing.assert_close((total / number).mean(), detailed.parts[name])
    torch.testing.assert_close(detailed.per_sample["flow"][1], 7.0 * (~batch["action_is_pad"]).sum(1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_computes_in_bfloat16_and_leaves_gradients_in_float32(checkpointing, awake):
    policy, batch = awake(checkpointing=checkpointing)
    expected = policy(batch).total
    dtypes: set[torch.dtype] = set()
    policy.model.layers[1].expert.query.register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        total = policy(batch).total
    total.backward()
    assert dtypes == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients(policy).values()} == {torch.float32}
    torch.testing.assert_close(total, expected, rtol=1e-2, atol=0)


def test_actions_are_normalised_by_the_statistics_of_their_dataset(awake):
    policy, batch = awake()
    before = policy(batch).total
    quantiles = {"q01": [-1.5] * 7, "q99": [2.5] * 7}
    policy.load_statistics([{"action": quantiles, "observation.state": quantiles}])
    assert not torch.equal(policy(batch).total, before)
    raw = dict(batch, action=batch["action"].clone())
    raw["action"][..., :7] = raw["action"][..., :7] * 2.0 + 0.5
    torch.testing.assert_close(policy(raw).total, before, rtol=1e-5, atol=0)


def test_every_parameter_has_a_role_by_name_and_shape():
    policy = build()
    roles = policy.parameter_roles()
    assert list(roles) == [name for name, _ in policy.named_parameters()]

    def role(name: str) -> tuple[str, bool]:
        return roles[name].part, roles[name].decay

    assert role("model.vision.patches.weight") == ("backbone", True)
    assert role("model.vision.position") == ("backbone", False)
    assert role("model.vision.layers.0.query.bias") == ("backbone", False)
    assert role("model.vocabulary.weight") == ("backbone", False)
    assert role("model.layers.2.backbone.mlp.gate.weight") == ("backbone", True)
    assert role("model.layers.2.backbone.mlp_norm.weight") == ("backbone", False)
    assert role("model.layers.2.expert.query.weight") == ("head", True)
    assert role("model.expert_norm.modulation.bias") == ("head", False)
    assert role("discrete.embedding.weight") == ("head", False)
    assert role("discrete.head.weight") == ("head", True)
    assert role("action_out.weight") == ("head", True)


def test_a_wrong_preset_names_every_wrong_key():
    preset = dict(policy_entry("pi05").presets["tiny"], horizonn=5, fast_tokens=-1)
    del preset["prompt_tokens"]
    with pytest.raises(ConfigurationError) as raised:
        _module().build(preset, Axes())
    text = str(raised.value)
    assert all(f"preset.{key}: " in text for key in ("horizonn", "fast_tokens", "prompt_tokens"))


def _module():
    build()
    return sys.modules[f"{PACKAGE}.pi05.policy"]


def test_truncated_fast_tokens_are_reported() -> None:
    """Their mean number per sample is among the parts, and not in the loss."""
    policy = build()
    batch = make_batch(policy.batch_spec(), 3)
    complete = policy({**batch, "fast_truncated": torch.zeros_like(batch["fast_truncated"])})
    truncated = policy({**batch, "fast_truncated": torch.arange(len(batch["fast_truncated"]))})
    assert truncated.parts["fast_truncated"].item() == (len(batch["fast_truncated"]) - 1) / 2
    assert torch.equal(truncated.total, complete.total)
