"""Action selection: the prefix is computed once, and each denoising step runs the expert alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from benchbox_policies._layers.families.flow import denoise
from benchbox_policies._layers.families.flow_policy import FlowPolicy
from benchbox_policies._layers.sequence.token_sequence import concat_blocks

from tests.support.policy_batches import POLICIES, build, make_batch
from tests.support.tiers import in_tiers

FLOW = [name for name in POLICIES if isinstance(build(name), FlowPolicy)]
flow = pytest.mark.parametrize("name", FLOW)


def test_euler_steps_of_a_constant_velocity_end_at_the_action():
    action, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    times = []

    def velocity(x_t: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        times.append(time.tolist())
        return noise - action

    torch.testing.assert_close(denoise(velocity, noise, 4), action, atol=1e-6, rtol=0)
    assert times == [[1.0] * 2, [0.75] * 2, [0.5] * 2, [0.25] * 2]


@flow
def test_the_expert_gives_the_same_result_with_a_cached_prefix(name, awake):
    policy, batch = awake(name, cams=2)
    policy.eval()
    batch, present = policy.prepare_batch(batch, acting=True)
    prefix = concat_blocks(policy.blocks(batch, present))
    for time in (1.0, 0.3):
        suffix, condition = policy.suffix(batch, batch["noise"][:, 0], torch.full((4,), time))
        _, together = policy.model(prefix, suffix, condition)
        cached = policy.model.forward_suffix(prefix, policy.model.prefill(prefix), suffix, condition)
        torch.testing.assert_close(cached, together, rtol=1e-5, atol=1e-6)


@flow
def test_the_prefix_is_computed_once_for_all_denoising_steps(name, awake):
    policy, batch = awake(name)
    calls: Counter[str] = Counter()
    policy.model.vision.register_forward_hook(lambda *_: calls.update(["vision"]))
    policy.model.layers[0].backbone.key.register_forward_hook(lambda *_: calls.update(["prefix"]))
    policy.model.layers[0].expert.key.register_forward_hook(lambda *_: calls.update(["expert"]))
    policy.select_actions(batch)
    images = 2 if "subgoal_images" in batch and batch["subgoal_mask"].any() else 1
    assert calls == {"vision": images, "prefix": 1, "expert": policy.config.denoising_steps}


@flow
def test_fast_tokens_and_the_true_action_do_not_change_selected_actions(name, awake):
    policy, batch = awake(name)
    changed = {key: value.clone() for key, value in batch.items()}
    for key in ("action", "fast_tokens", "uniform"):
        if key in changed:
            changed[key] = changed[key].flip(0)
    assert torch.equal(policy.select_actions(changed), policy.select_actions(batch))


@flow
def test_action_dimensions_that_the_dataset_lacks_go_from_noise_to_zero_as_in_training(name, awake):
    """No loss trains what the policy predicts for them."""
    policy, batch = awake(name)
    steps, noise = policy.config.denoising_steps, batch["noise"][:, 0, :, 7:]
    seen = []
    hook = policy.action_in.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 7:]))
    actions = policy.select_actions(batch)
    hook.remove()
    assert len(seen) == steps
    for number, x_t in enumerate(seen):
        torch.testing.assert_close(x_t, noise * (1 - number / steps))
    torch.testing.assert_close(actions[..., 7:], torch.zeros_like(noise))
    with torch.no_grad():
        policy.action_out.bias[7:] += 3.0
        assert torch.equal(policy.select_actions(batch), actions)
        policy.action_out.bias[:7] += 3.0
        assert not torch.equal(policy.select_actions(batch), actions)


@pytest.mark.parametrize("name", in_tiers(["pi0", "pi07_low_level"], "pi0".__eq__))  # one for each kind of suffix
def test_a_policy_overfitted_to_a_batch_selects_its_actions(name):
    """Actions are in raw units, denormalised by the statistics of the dataset."""
    policy = build(name)
    policy.eval()
    statistic = {"mean": [0.5] * 7, "std": [2.0] * 7, "q01": [-1.0] * 7, "q99": [1.0] * 7}
    policy.load_statistics([{"action": statistic, "observation.state": statistic}])
    batch = make_batch(policy.batch_spec(), 2)
    batch["action_is_pad"][:] = False
    batch["action"][..., :7] = 0.5 + torch.tensor([[[2.0]], [[-2.0]]])  # +1 and -1 once normalised
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)

    def error() -> torch.Tensor:
        return (policy.select_actions(batch)[..., :7] - batch["action"][..., :7]).abs().mean()

    for step in range(150):
        if step % 25 == 0 and error() < 0.4:  # half of what is asked
            break
        batch["uniform"] = torch.rand(batch["uniform"].shape, generator=generator)
        batch["noise"] = torch.randn(batch["noise"].shape, generator=generator)
        optimizer.zero_grad()
        policy(batch).total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    batch["noise"] = torch.randn(batch["noise"].shape, generator=generator)
    assert error() < 0.8, "their distance from the mean is 2.0"
