from __future__ import annotations

import pytest
import torch

from tests.support.policy_batches import awake, build, make_batch

DROPS = {"history": 0.3, "subgoal": 0.75, "response": 0.3, "metadata": 0.15}
LOW = pytest.mark.parametrize("name", ["pi07_low_level", "pi07_paligemma"])


def everything(policy, size):
    """A batch in which nothing is missing."""
    batch = make_batch(policy.batch_spec(), size)
    for key, value in batch.items():
        if key.endswith("_mask"):
            batch[key] = torch.ones_like(value)
    return batch


def blocks_of(policy, batch):
    seen = []
    handle = policy.model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    policy(batch)
    handle.remove()
    return seen[0]


@LOW
def test_the_prefix_is_videos_prompt_states_response_metadata_subgoal_and_discrete_actions(name):
    policy = build(name, cams=2).eval()
    prefix = blocks_of(policy, everything(policy, 1))
    assert list(prefix.spans) == ["images", "prompt", "states", "response", "metadata", "subgoal", "action cue", "fast"]
    sizes = {block: span.stop - span.start for block, span in prefix.spans.items()}
    assert sizes["images"] == sizes["subgoal"] == 2 * policy.config.model.image_tokens
    assert sizes["states"] == policy.config.history
    assert sizes["metadata"] == policy.config.metadata_fields * policy.config.metadata_tokens


@LOW
def test_blocks_that_nobody_has_are_left_out(name):
    policy = build(name).eval()
    batch = everything(policy, 1)
    for field in ("response_mask", "metadata_mask", "subgoal_mask"):
        batch[field][:] = False
    assert list(blocks_of(policy, batch).spans) == ["images", "prompt", "states", "action cue", "fast"]


@LOW
def test_training_leaves_context_out_as_often_as_it_says(name):
    """Each on its own; the response only where the subgoal is kept."""
    policy = build(name)
    batch = everything(policy, 1)
    count = 20_000
    many = {key: value.expand(count, *value.shape[1:]) for key, value in batch.items() if key.endswith("_mask")}
    uniform = torch.rand(count, policy.batch_spec().uniforms, generator=torch.Generator().manual_seed(0))
    masks = policy.dropped({**many, "uniform": uniform})

    def gone(mask):
        return ~mask.flatten(1).any(dim=1)

    past = masks["history_mask"][:, :-1]
    assert gone(past).float().mean() == pytest.approx(DROPS["history"], abs=0.02)
    assert torch.equal(gone(past), gone(masks["image_mask"][:, :-1]))
    assert masks["history_mask"][:, -1].all()
    assert masks["image_mask"][:, -1].all(), "the current frame is never dropped"
    subgoal, response = gone(masks["subgoal_mask"]), gone(masks["response_mask"])
    assert subgoal.float().mean() == pytest.approx(DROPS["subgoal"], abs=0.02)
    assert response[~subgoal].float().mean() == pytest.approx(DROPS["response"], abs=0.02)
    assert not response[subgoal].any()
    fields = ~masks["metadata_mask"].any(dim=2)  # (samples, K)
    expected = 1 - (1 - DROPS["metadata"]) * (1 - 0.05)
    assert fields.float().mean(dim=0).tolist() == pytest.approx([expected] * fields.shape[1], abs=0.02)
    assert gone(masks["metadata_mask"]).float().mean() == pytest.approx(DROPS["metadata"], abs=0.02)


@LOW
def test_in_validation_nothing_is_left_out(name):
    policy, batch = awake(name)
    everything_dropped = {**batch, "uniform": torch.zeros_like(batch["uniform"])}
    everything_dropped["uniform"][:, 0] = batch["uniform"][:, 0]  # the time of the flow
    assert not torch.equal(policy(everything_dropped).total, policy(batch).total)
    policy.eval()
    assert torch.equal(policy(everything_dropped).total, policy(batch).total)


@pytest.mark.parametrize("key", ["response_tokens", "metadata_tokens", "subgoal_images", "state", "images"])
def test_all_context_reaches_the_actions(key):
    policy, batch = awake("pi07_low_level")
    policy.eval()
    batch |= {name: value for name, value in everything(policy, 4).items() if name.endswith("_mask")}
    other = {**batch, key: batch[key].flip(0)}
    assert not torch.equal(policy(other).parts["flow"], policy(batch).parts["flow"])


def test_the_high_level_says_memory_and_then_subtask_after_their_cues():
    policy = build("pi07_high_level").eval()
    prefix = blocks_of(policy, everything(policy, 1))
    assert list(prefix.spans) == ["images", "prompt", "metadata", "memory cue", "memory", "response cue", "response"]
    assert policy.batch_spec().cues == {"memory": "Updated Memory: ", "response": "Subtask: "}
    assert set(policy(everything(policy, 1)).parts) == {"memory", "response"}
    first = prefix.predictor_indices("memory")[0, 0].item()
    assert first == prefix.spans["memory cue"].stop - 1, "the first word is predicted from the end of the cue"
