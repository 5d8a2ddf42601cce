from __future__ import annotations

import torch
from policy_batches import awake, build


def test_it_is_pi05_and_a_projection_of_the_state():
    """Parameters of the same names and shapes: pi05's weights load."""
    ours, vanilla = ({key: value.shape for key, value in build(name).state_dict().items()} for name in ("pi05_mem", "pi05"))
    more = {key for key in ours if key not in vanilla}
    assert {key for key in more if "normaliser" not in key} == {"state_in.weight", "state_in.bias"}
    assert all(ours[key] == shape for key, shape in vanilla.items())


def test_the_past_reaches_the_actions_and_padding_does_not():
    policy, batch = awake("pi05_mem")
    padded = dict(batch, history_mask=batch["history_mask"].clone(), image_mask=batch["image_mask"].clone())
    for name in ("history_mask", "image_mask"):
        padded[name][:, 0] = False
    for name, change in (("images", 255 - batch["images"][:, 0]), ("state", batch["state"][:, 0] + 1.0)):
        other = batch[name].clone()
        other[:, 0] = change
        assert not torch.equal(policy({**batch, name: other}).parts["flow"], policy(batch).parts["flow"]), name
        assert torch.equal(policy({**padded, name: other}).total, policy(padded).total), name


def test_states_are_normalised_by_the_statistics_of_their_dataset():
    policy, batch = awake("pi05_mem")
    before = policy(batch).total
    wide = {"q01": [-3.0] * 32, "q99": [5.0] * 32}  # the middle 1 and the half width 4
    policy.state_normaliser.load([wide])
    torch.testing.assert_close(policy({**batch, "state": batch["state"] * 4.0 + 1.0}).total, before, rtol=1e-4, atol=0)
