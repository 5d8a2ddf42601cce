from __future__ import annotations

import torch

from tests.support.policy_batches import build, make_batch


def test_it_is_pi05_and_a_projection_of_the_state():
    """Equal names and shapes allow pi05's weights to be loaded."""
    shapes, pi05_shapes = (
        {key: value.shape for key, value in build(name).state_dict().items()} for name in ("pi05_mem", "pi05")
    )
    added = {key for key in shapes if key not in pi05_shapes}
    assert {key for key in added if "normaliser" not in key} == {"state_in.weight", "state_in.bias"}
    assert all(shapes[key] == shape for key, shape in pi05_shapes.items())


def test_videos_prompt_and_states_are_one_group_and_every_later_token_is_its_own():
    policy = build("pi05_mem", cams=2)
    prefixes = []
    policy.model.register_forward_pre_hook(lambda _, arguments: prefixes.append(arguments[0]))
    batch = make_batch(policy.batch_spec(), 1)
    policy(batch)
    (prefix,) = prefixes
    assert list(prefix.spans) == ["images", "prompt", "states", "response", "fast"]
    together, causal = 2 * 16 + 48 + 3, 8 + 32
    assert prefix.groups.tolist() == [1] * together + list(range(2, 2 + causal))
    assert torch.equal(prefix.valid[:, prefix.spans["states"]], batch["history_mask"])
    assert not policy.batch_spec().state_in_prompt


@torch.no_grad()
def test_its_vision_tower_equals_that_of_pi05_for_one_frame_bit_for_bit():
    policy, pi05 = build("pi05_mem"), build("pi05")
    policy.load_state_dict(pi05.state_dict(), strict=False)
    batch = make_batch(policy.batch_spec(), 4)
    images, mask = batch["images"], batch["image_mask"]
    expected = pi05.model.images("images", images, mask).hidden
    assert torch.equal(policy.model.images("images", images[:, -1:], mask[:, -1:]).hidden, expected)
    assert not torch.allclose(policy.model.images("images", images, mask).hidden, expected)


def test_the_past_reaches_the_actions_and_padding_does_not(awake):
    policy, batch = awake("pi05_mem")
    padded = dict(batch, history_mask=batch["history_mask"].clone(), image_mask=batch["image_mask"].clone())
    for name in ("history_mask", "image_mask"):
        padded[name][:, 0] = False
    for name, change in (("images", 255 - batch["images"][:, 0]), ("state", batch["state"][:, 0] + 1.0)):
        changed = batch[name].clone()
        changed[:, 0] = change
        assert not torch.equal(policy({**batch, name: changed}).parts["flow"], policy(batch).parts["flow"]), name
        assert torch.equal(policy({**padded, name: changed}).total, policy(padded).total), name


def test_states_are_normalised_by_the_statistics_of_their_dataset(awake):
    policy, batch = awake("pi05_mem")
    before = policy(batch).total
    wide = {"q01": [-3.0] * 32, "q99": [5.0] * 32}  # the middle 1 and the half width 4
    policy.state_normaliser.load([wide])
    torch.testing.assert_close(policy({**batch, "state": batch["state"] * 4.0 + 1.0}).total, before, rtol=1e-4, atol=0)
