from __future__ import annotations

import pytest
import torch

from benchbox.measure.kernels import CallSite, KernelNames
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from tests.support.policy_batches import build, build_on_meta, make_batch


def test_full_is_siglip_a_projection_and_gemma_3_270m():
    """The backbone has 268.1 M parameters, including embeddings, and the tower is that of PaliGemma."""
    policy = build_on_meta("value", "full")
    sizes: dict[str, int] = {}
    for name, role in policy.parameter_roles().items():
        sizes[role.tower] = sizes.get(role.tower, 0) + policy.get_parameter(name).numel()
    assert sizes["backbone"] == 268_098_176
    assert sizes["vision"] == 412_442_352 + 1152 * 640 + 640
    assert sizes["head"] == 640 + 640 * 201 + 201 + 640 * 262_144, "value token, bins, and a head of the response"


@pytest.mark.parametrize(("returns", "bin_index"), [(-1.0, 0), (0.0, 50), (-0.5, 25), (-0.031, 48), (-0.021, 48), (-2.0, 0)])
def test_the_bin_of_a_return_is_rounded_down(returns, bin_index):
    assert build("value").bin_indices(torch.tensor([returns])).item() == bin_index


def test_the_expected_value_is_the_mean_of_the_middles_of_bins():
    policy = build("value")
    log_probabilities = torch.full((1, 51), -1e9)
    log_probabilities[0, [10, 20]] = torch.tensor(0.5).log()
    assert policy.expected_value(log_probabilities).item() == pytest.approx(-1 + 15.5 / 51)


def test_the_value_token_attends_to_images_and_prompt_and_no_token_attends_to_it(awake):
    policy, batch = awake("value")
    before = policy(batch).parts["value"]
    for name in ("images", "prompt_tokens"):
        assert not torch.equal(policy({**batch, name: batch[name].flip(0)}).parts["value"], before)
    outputs, prefix = [], 16 + 128
    policy.model.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    policy(batch)
    with torch.no_grad():
        policy.token.weight.add_(1.0)
    policy(batch)
    before, after = outputs
    assert torch.equal(after[:, :prefix], before[:, :prefix])
    assert not torch.equal(after[:, prefix + 1 :], before[:, prefix + 1 :]), "the response does"


def test_the_value_does_not_depend_on_the_response_and_the_response_is_learned(awake):
    policy, batch = awake("value")
    before = policy(batch).parts
    after = policy({**batch, "response_tokens": batch["response_tokens"].flip(0)}).parts
    assert torch.equal(after["value"], before["value"])
    assert not torch.equal(after["response"], before["response"])


def test_a_sample_without_actions_has_no_value_to_learn(awake):
    """Samples of question answering in OpenTau are such; reported distance and accuracy leave them out too."""
    policy, batch = awake("value")
    batch["action_is_pad"][1:] = True
    losses = policy(batch, per_sample=True)
    total, count = losses.per_sample["value"]
    assert count.tolist() == [1, 0, 0, 0]
    assert torch.equal(losses.parts["value"], total[0])
    assert [float(losses.counts[name]) for name in ("value", "l1", "accuracy", "response")] == [1, 1, 1, 4]
    alone = policy({key: tensor[:1] for key, tensor in batch.items()}).parts
    torch.testing.assert_close(losses.parts["l1"], alone["l1"])


def test_no_layer_has_a_window_and_positions_are_rotated_by_two_bases():
    policy = build("value")
    assert policy.model.windows == [None] * 3
    assert [unit.backbone.rope_base for unit in policy.model.layers] == [1e4, 1e4, 1e6]


def test_l1_and_accuracy_are_reported_and_not_in_the_loss():
    policy = build("value")
    batch = make_batch(policy.batch_spec(), 8)
    losses = policy(batch)
    torch.testing.assert_close(losses.total, losses.parts["value"] + losses.parts["response"])
    assert 0.0 <= losses.parts["accuracy"] <= 1.0
    uniform = (batch["returns"] + 0.5).abs().mean()
    assert losses.parts["l1"].item() == pytest.approx(uniform.item(), abs=0.1), "an untrained policy predicts the middle"


def test_the_softmax_over_bins_is_not_recorded_as_attention(awake):
    policy, batch = awake("value")
    call_site = CallSite(policy)
    kernels = KernelNames(call_site)
    with call_site, OperationDispatchMode(kernels):
        policy(batch)
    assert kernels.attention == "sdpa:flash_cpu"
