"""pi06: the layers of Gemma 3 beside those of a plain Gemma expert."""

from __future__ import annotations

import pytest
import torch

from tests.support.policy_batches import build, build_on_meta, make_batch

GEMMA_3 = pytest.mark.parametrize("name", ["pi06", "pi07_low_level"])


@GEMMA_3
def test_the_expert_of_full_has_the_parameters_of_a_gemma_with_adarms(name):
    """34 layers: attention and MLP, and a modulation of 3 x 1280 for every norm, as for the final one."""
    policy = build_on_meta(name, "full")
    attention, mlp, modulation = 1280 * 256 * (8 + 4 + 4 + 8), 3 * 1280 * 5120, (1280 + 1) * 3 * 1280
    expert = [parameter for key, parameter in policy.named_parameters() if ".expert" in key]
    assert sum(map(torch.numel, expert)) == 34 * (attention + mlp + 2 * modulation) + modulation == 1_275_267_840


@GEMMA_3
def test_only_the_backbone_has_norms_of_queries_and_keys_and_after_its_branches(name):
    for unit in build(name).model.layers:
        for norm in ("query_norm", "key_norm", "output_norm", "down_norm"):
            assert getattr(unit.expert, norm) is None
            assert getattr(unit.backbone, norm) is not None


@pytest.mark.parametrize("name", ["pi06", "pi07_low_level", "pi07_high_level"])
def test_no_layer_has_a_window_and_backbone_and_expert_rotate_alike(name):
    policy = build(name)
    assert policy.model.windows == [None] * 3
    for unit, rope in zip(policy.model.layers, [(1e4, 1.0), (1e4, 1.0), (1e6, 8.0)], strict=True):
        assert (unit.backbone.rope_base, unit.backbone.rope_stretch) == rope
        if hasattr(unit, "expert"):
            assert (unit.expert.rope_base, unit.expert.rope_stretch) == rope


def test_the_expert_reads_actions_in_training_and_when_it_acts(awake):
    policy, batch = awake("pi06")
    prefixes = []
    policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    policy(batch)
    prefill = policy.model.prefill
    policy.model.prefill = lambda prefix: prefixes.append(prefix) or prefill(prefix)
    policy.select_actions(batch)
    trained, acted = prefixes
    assert list(trained.spans) == ["images", "prompt", "response", "action cue", "fast"]
    assert list(acted.spans) == ["images", "prompt", "response", "action cue"]
    assert torch.equal(acted.valid.sum(dim=1), trained.visible_to_suffix.sum(dim=1))
    assert trained.visible_to_suffix[:, trained.spans["action cue"]].all()


@GEMMA_3
def test_fast_tokens_have_a_head_with_a_bias(name):
    assert build(name).discrete.head.bias.shape == (512,)


def test_a_batch_without_responses_reports_no_response():
    policy = build("pi06")
    batch = make_batch(policy.batch_spec(), 4)
    batch["response_mask"][1:] = False
    losses, alone = policy(batch), policy({key: tensor[:1] for key, tensor in batch.items()})
    assert losses.counts["response"] == 1
    torch.testing.assert_close(losses.parts["response"], alone.parts["response"])
    batch["response_mask"][:] = False
    losses = policy(batch)
    assert losses.counts["response"] == losses.parts["response"] == 0
