"""VITRA: prefix, loss of the hands, and action selection."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchbox_policies.vitra.policy import PARTS, PartWeights, part_losses
from benchbox_policies.vitra.policy import build as build_vitra

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import find_policies
from tests.support.policy_batches import build, build_on_meta, gradients, make_batch, wake

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, Policy

HAND = 51  # dimensions


def vitra(**changes: Any) -> Policy:
    """Build the tiny policy with changed presets."""
    torch.manual_seed(0)
    return build_vitra({**find_policies()["vitra"].presets["tiny"], **changes}, Axes())


def hands(policy: Policy, dims: slice, size: int = 4) -> Batch:
    """Return a batch of full chunks with these action dimensions."""
    batch = make_batch(policy.batch_spec(), size)
    batch["action_is_pad"][:] = False
    batch["action_dim_mask"] = torch.zeros_like(batch["action_dim_mask"])
    batch["action_dim_mask"][:, dims] = True
    return batch


def test_full_is_paligemma_2_and_dit_b():
    """The policy has 3.032 B and 136.6 M parameters, and two tokens."""
    policy = build_on_meta("vitra", "full")
    sizes: dict[str, int] = {}
    for name, role in policy.parameter_roles().items():
        sizes[role.tower] = sizes.get(role.tower, 0) + policy.get_parameter(name).numel()
    assert sizes["vision"] + sizes["backbone"] == 3_032_242_416
    assert sizes["expert"] == 136_587_456
    assert sizes["head"] == (2 * 2304 + 2304) + (2304 * 2304 + 2304) + 2304
    assert sum(sizes.values()) == 3_174_149_808
    assert policy.config.model.image_tokens == 256


def test_the_diffusion_transformer_is_the_expert_and_the_added_tokens_are_the_head():
    roles = build("vitra").parameter_roles()
    towers = {name.split(".")[0]: (role.tower, role.part) for name, role in roles.items() if not name.startswith("model.")}
    assert towers == {"field_of_view": ("head", "head"), "cognition": ("head", "head"), "dit": ("expert", "head")}
    undecayed = [name for name, role in roles.items() if name.startswith("dit.") and not role.decay]
    assert {"dit.no_condition", "dit.position"} <= set(undecayed)
    assert "dit.layers.0.up.weight" not in undecayed


def test_the_cognition_token_is_last_and_attends_to_everything_but_padding(awake):
    policy, batch = awake("vitra", cams=2)
    batch["prompt_mask"][:, :8], batch["prompt_mask"][:, 8:] = True, False
    blocks = policy.blocks(batch, frozenset())
    assert [block.name for block in blocks] == ["images", "prompt", "field of view", "cognition"]
    assert blocks[-1].hidden.shape == (4, 1, policy.config.model.backbone.width)

    before = policy.condition(batch, frozenset())
    for name, index in (
        ("images", (slice(None), slice(None), 0)),
        ("images", (slice(None), slice(None), 1)),
        ("prompt_tokens", (slice(None), 0)),
        ("prompt_tokens", (slice(None), 7)),
        ("field_of_view", (slice(None), 0)),
        ("field_of_view", (slice(None), 1)),
    ):
        changed = {**batch, name: batch[name].clone()}
        changed[name][index] = batch[name][index].flip(0) + 1
        assert (policy.condition(changed, frozenset()) != before).any(dim=-1).all(), (name, index)
    changed = {**batch, "prompt_tokens": batch["prompt_tokens"].clone()}
    changed["prompt_tokens"][:, 8:] += 1
    assert torch.equal(policy.condition(changed, frozenset()), before)


@torch.no_grad()
def test_field_of_view_and_cognition_token_are_multiplied_by_the_root_of_the_width_like_text():
    policy = build("vitra")
    batch = make_batch(policy.batch_spec(), 4)
    blocks = {block.name: block.hidden for block in policy.blocks(batch, frozenset())}
    root = policy.config.model.backbone.width**0.5
    assert root == 8.0
    assert torch.equal(blocks["field of view"][:, 0], root * policy.field_of_view(batch["field_of_view"]))
    assert torch.equal(blocks["cognition"], (root * policy.cognition.weight).expand(4, 1, -1))
    words = torch.nn.functional.embedding(batch["prompt_tokens"], policy.model.vocabulary.weight)
    assert torch.equal(blocks["prompt"], root * words)


def test_added_tokens_start_as_small_as_rows_of_the_embedding_table():
    """The cognition token of a published model starts as a row of it."""
    policy = build("vitra", "small")
    for weight in (policy.cognition.weight, *policy.field_of_view.parameters(), policy.model.vocabulary.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_images_prompt_and_field_of_view_attend_to_one_another(awake):
    """The first token attends to later tokens, as in a prefix of PaliGemma."""
    policy, batch = awake("vitra")
    batch["prompt_mask"][:] = True
    first_tokens: list[torch.Tensor] = []
    policy.model.layers[-1].register_forward_hook(lambda _, __, output: first_tokens.append(output[:, 0]))
    policy.condition(batch, frozenset())
    batch["field_of_view"] = batch["field_of_view"] + 1
    policy.condition(batch, frozenset())
    assert (first_tokens[0] != first_tokens[1]).any(dim=-1).all()


def test_each_part_is_its_mean_squared_error_weighted_by_its_number_of_steps():
    """Written out per element, for a sample with both hands and one with a part of the left hand."""
    torch.manual_seed(0)
    predicted, noise = torch.randn(2, 2, 4, 120), torch.randn(2, 2, 4, 120)
    action_mask = torch.zeros(2, 4, 120, dtype=torch.bool)
    action_mask[0, :, :102] = True
    action_mask[0, 2:, 51:] = False  # the right hand for 2 steps of 4
    action_mask[1, :3, :8] = True
    for part_weights in (PartWeights(), PartWeights(pose=1.6, joints=0.4)):
        terms, weights = part_losses(predicted, noise, action_mask, part_weights)
        for name, weight, ranges in (
            ("left_6d", part_weights.pose, [(4, 0, 6), (3, 0, 6)]),
            ("left_joints", part_weights.joints, [(4, 6, 51), (3, 6, 8)]),
            ("right_6d", part_weights.pose, [(2, 51, 57), (0, 51, 51)]),
            ("right_joints", part_weights.joints, [(2, 57, 102), (0, 57, 57)]),
        ):
            for sample, (steps, low, high) in enumerate(ranges):
                expected = sum(
                    (predicted[sample, draw, step, dim] - noise[sample, draw, step, dim]).item() ** 2
                    for draw in range(2)
                    for step in range(steps)
                    for dim in range(low, high)
                )
                total, count = (values[sample].item() for values in terms[name])
                assert total == pytest.approx(expected, rel=1e-5)
                assert count == 2 * steps * (high - low)
                assert weights[name][sample].item() == pytest.approx(weight * steps / (12, 6)[sample])


def test_the_loss_is_the_mean_over_samples_of_their_weighted_parts():
    policy, batch = vitra(weights={"pose": 1.6, "joints": 0.4}), hands(build("vitra"), slice(0, 102))
    batch["action_is_pad"][1, 3:] = True
    batch["action_dim_mask"][2, HAND:] = False
    losses = policy(batch, per_sample=True)
    means = {name: total / count.clamp(min=1) for name, (total, count) in losses.per_sample.items()}
    both = 0.8 * (means["left_6d"] + means["right_6d"]) / 2 * 2 + 0.2 * (means["left_joints"] + means["right_joints"]) / 2 * 2
    both = both / 2
    left = (1.6 * means["left_6d"] + 0.4 * means["left_joints"]) / 2
    expected = torch.where(torch.tensor([False, False, True, False]), left, both).mean()
    torch.testing.assert_close(losses.total, expected)
    for name, mean in means.items():
        with_part = losses.per_sample[name][1] > 0
        torch.testing.assert_close(losses.parts[name], mean[with_part].mean())
    assert losses.counts["right_6d"] == 3, "the third sample has no right hand"


def test_a_dataset_of_left_hands_has_no_loss_of_right_hands(awake):
    policy, batch = awake("vitra")
    batch |= {name: hands(policy, slice(0, HAND))[name] for name in ("action_dim_mask", "action_is_pad")}
    losses = policy(batch, per_sample=True)
    losses.total.backward()
    for part in ("right_6d", "right_joints"):
        assert losses.parts[part] == losses.counts[part] == 0
        assert [values.tolist() for values in losses.per_sample[part]] == [[0.0] * 4] * 2
    assert losses.total.isfinite()
    torch.testing.assert_close(losses.total, (losses.parts["left_6d"] + losses.parts["left_joints"]) / 2)
    out = policy.dit.action_out.weight.grad
    assert out[:HAND].any(dim=1).all()
    assert not out[HAND:].any()
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients(policy).values())


def test_a_sample_without_hand_dimensions_has_a_loss_of_zero(awake):
    policy, batch = awake("vitra")
    batch["action_dim_mask"] = (torch.arange(192) >= 102).expand(4, -1)
    losses = policy(batch)
    losses.total.backward()
    assert losses.total == 0
    assert not any(gradient.any() for gradient in gradients(policy).values())


@pytest.mark.parametrize("field", ["action", "noise"])
def test_unused_dimensions_and_steps_past_the_end_are_neither_read_nor_trained(field, awake):
    policy, batch = awake("vitra")
    batch["action_dim_mask"] = torch.ones_like(batch["action_dim_mask"])
    changed = {**batch, field: batch[field].clone()}
    changed[field][..., 102:] += 1.0
    is_pad = batch["action_is_pad"].view(4, *[1] * (changed[field].ndim - 3), -1, 1)
    changed[field] = torch.where(is_pad, 5.0, changed[field])
    assert torch.equal(policy(changed).total, policy(batch).total)
    changed[field][..., 101] += 1.0
    assert not torch.equal(policy(changed).total, policy(batch).total)


def test_a_chunk_is_noised_several_times_with_different_noise():
    policy = vitra(repeated_samples=2, condition_drop=0.0, state_drop=0.0)
    spec = policy.batch_spec()
    batch = make_batch(spec, 4)
    wake(policy, batch)
    assert batch["noise"].shape[1] == spec.noise_draws == 2
    assert build("vitra").batch_spec().noise_draws == 8
    single = vitra(repeated_samples=1, condition_drop=0.0, state_drop=0.0)
    single.load_state_dict(policy.state_dict())
    totals = [
        single({**batch, "noise": batch["noise"][:, [draw]], "uniform": batch["uniform"][:, [draw, draw, -1]]}).total
        for draw in range(2)
    ]
    assert totals[0] != totals[1]
    torch.testing.assert_close(policy(batch).total, torch.stack(totals).mean())


@pytest.mark.parametrize(("drop", "field"), [("condition_drop", "images"), ("state_drop", "state")])
def test_training_drops_condition_and_state_by_their_uniform_numbers(drop, field):
    policies = [vitra(condition_drop=0.0, state_drop=0.0), vitra(**{"condition_drop": 0.0, "state_drop": 0.0, drop: 1.0})]
    batch = make_batch(policies[0].batch_spec(), 4)
    wake(policies[0], batch)
    policies[1].load_state_dict(policies[0].state_dict())
    changed = {**batch, field: batch[field].flip(0)}
    never, always = ((policy(batch).total, policy(changed).total) for policy in policies)
    assert never[0] != never[1]
    assert torch.equal(*always)
    for policy in policies:
        policy.eval()
    assert torch.equal(policies[1](batch).total, policies[0](batch).total), "validation drops nothing"


def test_every_chunk_has_numbers_of_its_own_for_time_and_condition_and_the_state_has_the_last():
    policy = vitra(repeated_samples=2)
    batch = make_batch(policy.batch_spec(), 3)
    batch["uniform"] = torch.tensor(
        [[0.0, 0.515, 0.05, 0.5, 0.5], [0.999, 0.205, 0.5, 0.09, 0.1], [0.705, 0.705, 0.5, 0.5, 0.05]]
    )
    arguments = []
    policy.dit.register_forward_pre_hook(lambda _, args: arguments.append(args))
    policy(batch)
    _, _, timestep, _, unconditional, _, state_mask = arguments[0]
    assert timestep.tolist() == [[0, 51], [99, 20], [70, 70]]
    assert unconditional.tolist() == [[True, False], [False, True], [False, False]]
    assert state_mask.any(dim=1).tolist() == [True, True, False]


def test_training_drops_one_in_ten_conditions():
    policy = build("vitra")
    unconditional = []
    policy.dit.register_forward_pre_hook(lambda _, args: unconditional.append(args[4]))
    batch = make_batch(policy.batch_spec(), 64)
    policy(batch)
    policy.eval()
    policy(batch)
    assert unconditional[0].shape == (64, 8)
    assert unconditional[0].float().mean().item() == pytest.approx(0.1, abs=0.04)
    assert not unconditional[1].any()


def test_rounding_the_parameters_does_not_change_the_noise_schedule():
    policy = build("vitra")
    low = copy.deepcopy(policy).to(torch.bfloat16)
    batch = make_batch(policy.batch_spec(), 2)
    noisy = []
    for model in (policy, low):
        model.dit.register_forward_pre_hook(lambda _, args: noisy.append(args[0]))
        model(batch)
    assert noisy[1].dtype == torch.float32
    assert torch.equal(*noisy)


def test_the_learned_unconditional_vector_matters_only_with_guidance():
    for guidance, matters in ((1.0, False), (5.0, True)):
        policy = vitra(guidance=guidance)
        batch = make_batch(policy.batch_spec(), 2)
        wake(policy, batch)
        before = policy.select_actions(batch)
        with torch.no_grad():
            policy.dit.no_condition.add_(1.0)
        assert torch.equal(policy.select_actions(batch), before) != matters


def test_the_prefix_is_computed_once_and_the_transformer_once_per_step(awake):
    policy, batch = awake("vitra")
    calls = []
    policy.model.register_forward_hook(lambda *_: calls.append("prefix"))
    policy.dit.register_forward_hook(lambda _, args, __: calls.append(args[2][0, 0].item()))
    policy.select_actions(batch)
    assert calls == ["prefix", *range(90, -1, -10)]


def test_actions_outside_the_dataset_s_dimensions_are_its_mean(awake):
    """Dimensions beyond the hands are never trained, whatever a dataset has there."""
    policy, batch = awake("vitra")

    def statistics(state: int, action: int) -> list[dict[str, dict[str, list[float]]]]:
        return [
            {
                name: {"mean": [0.5] * dims, "std": [2.0] * dims}
                for name, dims in (("observation.state", state), ("action", action))
            }
        ]

    masks = []
    policy.dit.register_forward_pre_hook(lambda _, args: masks.append((args[1], args[6])))
    policy.load_statistics(statistics(60, 110))
    actions = policy.select_actions(batch)
    assert (actions[..., :102] != 0.5).all()
    assert (actions[..., 102:110] == 0.5).all()
    assert not actions[..., 110:].any()
    policy.load_statistics(statistics(9, HAND))
    assert not policy.select_actions(batch)[..., HAND:].any()
    assert masks[0][0].sum(dim=-1).unique().tolist() == [102]
    assert masks[0][1].sum(dim=-1).unique().tolist() == [60]
    assert masks[-1][0].sum(dim=-1).unique().tolist() == [HAND]
    assert masks[-1][1].sum(dim=-1).unique().tolist() == [9]


@pytest.mark.exhaustive
def test_a_policy_overfitted_to_a_batch_selects_its_actions():
    """Actions are in raw units, with guidance and without."""
    policy = vitra()
    statistic = {"mean": [0.5] * 6, "std": [2.0] * 6}
    policy.load_statistics([{"action": statistic, "observation.state": statistic}])
    batch = hands(policy, slice(0, 6), 2)
    batch["action"][..., :6] = 0.5 + torch.tensor([[[2.0]], [[-2.0]]])  # +1 and -1 once normalised
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        batch["uniform"] = torch.rand(batch["uniform"].shape, generator=generator)
        batch["noise"] = torch.randn(batch["noise"].shape, generator=generator)
        optimizer.zero_grad()
        policy(batch).total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    batch["noise"] = torch.randn(batch["noise"].shape, generator=generator)
    for guidance in (1.0, 5.0):
        policy.config = replace(policy.config, guidance=guidance)
        actions = policy.select_actions(batch)[..., :6]
        error = (actions - batch["action"][..., :6]).abs().mean()
        assert error < 0.5, f"with guidance {guidance}: their distance from the mean is 2.0"


def test_parts_cover_both_hands_without_gaps():
    """The order is translation, rotation and joints, of the left hand and then of the right."""
    covered = [dim for dims in PARTS.values() for dim in range(dims.start, dims.stop)]
    assert covered == list(range(102))
    assert [dims.stop - dims.start for dims in PARTS.values()] == [6, 45, 6, 45]
