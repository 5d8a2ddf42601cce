from __future__ import annotations

import pytest
import torch

from tests.support.policy_batches import build, make_batch

DROPS = {"history": 0.3, "subgoal": 0.75, "response": 0.3, "metadata": 0.15}
LOW = pytest.mark.parametrize("name", ["pi07_low_level", "pi07_paligemma"])


def full_batch(policy, size):
    """Return a batch in which no field is masked."""
    batch = make_batch(policy.batch_spec(), size)
    for key, value in batch.items():
        if key.endswith("_mask"):
            batch[key] = torch.ones_like(value)
    return batch


def record_prefix(policy, batch):
    prefixes = []
    handle = policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    policy(batch)
    handle.remove()
    return prefixes[0]


@LOW
def test_the_prefix_is_videos_prompt_states_response_metadata_subgoal_and_discrete_actions(name):
    policy = build(name, cams=2).eval()
    prefix = record_prefix(policy, full_batch(policy, 1))
    subgoals = ["subgoal 0", "subgoal 1"] if name == "pi07_low_level" else ["subgoal"]
    blocks = [block for block in prefix.spans if not block.endswith(" cue")]
    assert blocks == ["images", "prompt", "states", "response", "metadata", *subgoals, "fast"]
    sizes = {block: span.stop - span.start for block, span in prefix.spans.items()}
    assert sizes["images"] == sum(sizes[block] for block in subgoals) == 2 * policy.config.model.image_tokens
    assert sizes["states"] == policy.config.history
    assert sizes["metadata"] == policy.config.metadata_fields * policy.config.metadata_tokens


@LOW
def test_blocks_that_no_rank_has_are_absent(name):
    policy = build(name).eval()
    batch = full_batch(policy, 1)
    for field in ("response_mask", "metadata_mask", "subgoal_mask"):
        batch[field][:] = False
    words = ["state cue", "states", "state_end cue", "action cue"]
    assert list(record_prefix(policy, batch).spans) == ["images", "prompt", *words, "fast"]


@LOW
def test_words_are_masked_with_the_block_that_they_announce(name):
    """In a batch of samples with all of the context, one block of it and none of it."""
    policy = build(name).eval()
    batch = full_batch(policy, 5)
    fields = ("response", "metadata", "subgoal")
    for sample, kept in enumerate([fields, *((field,) for field in fields), ()]):
        for field in fields:
            batch[f"{field}_mask"][sample] = field in kept
    prefix = record_prefix(policy, batch)
    masks = {block: prefix.valid[:, span].all(dim=1).tolist() for block, span in prefix.spans.items()}
    for cue, owners in policy.announced.items():
        owner_masks = [batch[f"{owner}_mask"].flatten(1).any(dim=1) for owner in owners]
        assert masks[f"{cue} cue"] == torch.stack(owner_masks).any(dim=0).tolist(), cue
    if name == "pi07_low_level":
        assert masks["context cue"] == [not end for end in masks["state_end cue"]] == [True] * 4 + [False]


def test_each_subgoal_image_of_the_low_level_is_a_group_of_its_own():
    policy = build("pi07_low_level", cams=2).eval()
    prefix = record_prefix(policy, full_batch(policy, 1))
    groups = {block: set(prefix.groups[span].tolist()) for block, span in prefix.spans.items()}
    assert len(groups["images"]) == len(groups["subgoal 0"]) == len(groups["subgoal 1"]) == 1
    assert groups["subgoal 1"] == {max(groups["subgoal 0"]) + 1}
    assert len(groups["states"]) == 1


@LOW
def test_the_low_level_reads_the_response_and_does_not_learn_it(name, awake):
    policy, batch = awake(name)
    assert "response" not in policy(batch).parts
    assert [block.name for block in record_prefix(policy, batch).target_blocks] == ["fast"]


@LOW
def test_training_drops_inputs_with_the_configured_probabilities(name):
    """Inputs are dropped independently, except that the response is dropped only where the subgoal is not."""
    policy = build(name)
    batch = full_batch(policy, 1)
    count = 20_000
    expanded = {key: value.expand(count, *value.shape[1:]) for key, value in batch.items() if key.endswith("_mask")}
    uniform = torch.rand(count, policy.batch_spec().uniforms, generator=torch.Generator().manual_seed(0))
    masks = policy.drop_inputs({**expanded, "uniform": uniform})

    def is_dropped(mask):
        return ~mask.flatten(1).any(dim=1)

    past = masks["history_mask"][:, :-1]
    assert is_dropped(past).float().mean() == pytest.approx(DROPS["history"], abs=0.02)
    assert torch.equal(is_dropped(past), is_dropped(masks["image_mask"][:, :-1]))
    assert masks["history_mask"][:, -1].all()
    assert masks["image_mask"][:, -1].all(), "the current frame is never dropped"
    subgoal, response = is_dropped(masks["subgoal_mask"]), is_dropped(masks["response_mask"])
    assert subgoal.float().mean() == pytest.approx(DROPS["subgoal"], abs=0.02)
    assert response[~subgoal].float().mean() == pytest.approx(DROPS["response"], abs=0.02)
    assert not response[subgoal].any()
    fields = ~masks["metadata_mask"].any(dim=2)  # (samples, K)
    expected = 1 - (1 - DROPS["metadata"]) * (1 - 0.05)
    assert fields.float().mean(dim=0).tolist() == pytest.approx([expected] * fields.shape[1], abs=0.02)
    assert is_dropped(masks["metadata_mask"]).float().mean() == pytest.approx(DROPS["metadata"], abs=0.02)


@LOW
def test_validation_drops_nothing(name, awake):
    policy, batch = awake(name)
    all_dropped = {**batch, "uniform": torch.zeros_like(batch["uniform"])}
    all_dropped["uniform"][:, 0] = batch["uniform"][:, 0]  # the time of the flow
    assert not torch.equal(policy(all_dropped).total, policy(batch).total)
    policy.eval()
    assert torch.equal(policy(all_dropped).total, policy(batch).total)


@pytest.mark.parametrize("key", ["response_tokens", "metadata_tokens", "subgoal_images", "state", "images"])
def test_every_context_input_reaches_the_actions(key, awake):
    policy, batch = awake("pi07_low_level")
    policy.eval()
    batch |= {name: value for name, value in full_batch(policy, 4).items() if name.endswith("_mask")}
    changed = {**batch, key: batch[key].flip(0)}
    assert not torch.equal(policy(changed).parts["flow"], policy(batch).parts["flow"])


def test_the_high_level_predicts_memory_and_then_subtask_after_their_cues():
    policy = build("pi07_high_level").eval()
    prefix = record_prefix(policy, full_batch(policy, 1))
    metadata = ["metadata cue", "metadata", "metadata_end cue"]
    assert list(prefix.spans) == ["images", "prompt", *metadata, "memory cue", "memory", "response cue", "response"]
    assert set(policy(full_batch(policy, 1)).parts) == {"memory", "response"}
    predictor = prefix.predictor_indices("memory")[0, 0].item()
    assert predictor == prefix.spans["memory cue"].stop - 1, "the first token is predicted from the end of the cue"


@LOW
@pytest.mark.parametrize("kept", [(), ("response",), ("metadata",), ("subgoal",), ("response", "subgoal")], ids=str)
def test_a_sample_is_masked_alike_alone_and_beside_samples_with_more_context(name, kept):
    """Blocks that no sample of a batch has leave no trace in it: the groups of the others are the same."""
    policy = build(name).eval()
    batch = full_batch(policy, 2)
    for field in ("response", "metadata", "subgoal"):
        batch[f"{field}_mask"][0] = field in kept
    alone = {key: value[:1] for key, value in batch.items()}
    rows = []
    for seen in (batch, alone):
        prefix = record_prefix(policy, seen)
        valid = prefix.valid[0]
        groups = prefix.groups[valid]
        rows.append(groups[:, None] >= groups[None, :])
    assert torch.equal(*rows)
