"""Properties of every policy."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from benchbox.errors import DataError, UnsupportedError
from tests.support import policy_batches
from tests.support.policy_batches import POLICIES, build, build_on_meta, gradients, make_batch
from tests.support.tiers import in_tiers

# Parameters of `full`, with the rounded published count in a comment.
COUNTS = {
    "pi0": 3_238_048_528,  # 3.24 B
    "pi05": 3_361_824_528,  # 3.36 B
    "pi05_mem": 3_361_892_112,  # pi05 and a projection of the state
    "pi06": 5_585_658_768,
    "pi07_low_level": 5_585_743_248,  # 5.59 B
    "pi07_high_level": 4_296_540_528,  # 4.30 B
    "pi07_paligemma": 3_361_892_112,
    "value": 849_180_089,
    "vitra": 3_174_149_808,  # PaliGemma 2 (3.03 B), DiT-B (136.6 M) and two tokens
    "cosmos_droid": 14_550_802_624,  # the published 16 B include a vision tower and a text head, which take no part in a step
}
SIGLIP = {"vision.heads": 16, "vision.image": 224, "vision.patch": 14, "vision.temporal_every": None, "pool": None}
VIDEO = SIGLIP | {"vision.temporal_every": 4}
POOLED = {"vision.image": 448, "pool": 2}
GEMMA = {
    "backbone.heads": 8,
    "backbone.kv_heads": 1,
    "backbone.head_dim": 256,
    "backbone.activation": "gelu",
    "backbone.unit_norm": True,
    "backbone.softcap": None,
    "backbone.rope_base": 1e4,
    "backbone.window": None,
    "backbone.global_every": 1,
    "backbone.global_rope_base": None,
    "backbone.global_rope_stretch": 1.0,
}
GEMMA_2 = GEMMA | {"backbone.kv_heads": 4, "backbone.softcap": 50.0, "backbone.window": 4096, "backbone.global_every": 2}
GEMMA_3 = GEMMA | {
    "backbone.kv_heads": 4,
    "backbone.global_every": 6,
    "backbone.global_rope_base": 1e6,
    "backbone.global_rope_stretch": 8.0,
}
GEMMA_3_270M = GEMMA_3 | {"backbone.heads": 4, "backbone.kv_heads": 1, "backbone.global_rope_stretch": 1.0}
QWEN_3 = {
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "activation": "silu",
    "unit_norm": False,
    "softcap": None,
    "rope_base": 5e6,
    "window": None,
    "global_every": 1,
    "global_rope_base": None,
}
TEXT = {"prompt_tokens": 200, "response_tokens": 52}
FAST = {"fast_tokens": 32, "fast_vocab": 2048, "knowledge_insulation": True}
CHUNK = {"horizon": 50, "history": 1, "denoising_steps": 10}
DROPS = {"history": 0.3, "subgoal": 0.75, "response": 0.3, "metadata": 0.15, "metadata_field": 0.05}
CONTEXT = TEXT | FAST | CHUNK | {"history": 6, **{f"drops.{name}": share for name, share in DROPS.items()}}
# Settings of `full` that its number of parameters does not show.
SETTINGS = {
    "pi0": SIGLIP | GEMMA | CHUNK | {"prompt_tokens": 48, "fast_tokens": 0, "knowledge_insulation": False},
    "pi05": SIGLIP | GEMMA | TEXT | FAST | CHUNK,
    "pi05_mem": VIDEO | GEMMA | TEXT | FAST | CHUNK | {"history": 8},
    "pi06": SIGLIP | POOLED | GEMMA_3 | TEXT | FAST | CHUNK | {"denoising_steps": 5},
    "pi07_low_level": VIDEO | POOLED | GEMMA_3 | CONTEXT | {"denoising_steps": 5},
    "pi07_high_level": SIGLIP | POOLED | GEMMA_3 | TEXT | {"history": 1, "memory_tokens": 52},
    "pi07_paligemma": VIDEO | GEMMA | CONTEXT,
    "value": SIGLIP | GEMMA_3_270M | TEXT | {"history": 1},
    "vitra": SIGLIP
    | GEMMA_2
    | {
        "dit.heads": 12,
        "horizon": 16,
        "history": 1,
        "diffusion_steps": 100,
        "denoising_steps": 10,
        "guidance": 5.0,
        "repeated_samples": 8,
        "condition_drop": 0.1,
        "state_drop": 0.1,
        "weights.pose": 1.0,
        "weights.joints": 1.0,
    },
    "cosmos_droid": QWEN_3
    | {
        "image": (352, 640),
        "horizon": 32,
        "fps": 15,
        "domain": 8,
        "time_shift": 5.0,
        "caption_drop": 0.1,
        "normalisation": "identity",
        "denoising_steps": 10,
        "guidance": 3.0,
    },
}
NETWORKS = ("pi07_low_level", "value", "vitra", "cosmos_droid")  # a policy of each, with all the blocks that it can have
WITHOUT_SAMPLE_LOSSES = "pi07_high_level"  # as published

every = pytest.mark.parametrize("name", POLICIES)


def count(policy: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in policy.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_full_has_the_published_number_of_parameters(name):
    assert count(build_on_meta(name, "full")) == COUNTS[name]


def flatten(settings: dict[str, object], prefix: str = "") -> dict[str, object]:
    """Return nested settings by dotted name, those of the model without its name."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        path = prefix if name == "model" else f"{prefix}{name}."
        flat |= flatten(value, path) if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


@pytest.mark.parametrize("name", SETTINGS)
def test_full_has_the_published_settings_that_its_number_of_parameters_does_not_show(name):
    settings = flatten(asdict(build_on_meta(name, "full").config))
    assert {key: settings[key] for key in SETTINGS[name]} == SETTINGS[name]


@every
def test_tiny_has_less_than_a_million_parameters_and_small_tens_of_millions(name):
    assert count(build_on_meta(name, "tiny")) < 1e6
    assert 1e7 < count(build_on_meta(name, "small")) < 1e8


# By default one policy of each network; the test of the FLOPs of `full` takes a step of pi05.
@pytest.mark.parametrize("name", in_tiers(POLICIES, NETWORKS.__contains__))
def test_a_step_of_full_has_the_right_shapes(name):
    policy = build_on_meta(name, "full")
    policy.zero_grad()
    batch = make_batch(policy.batch_spec(), 1)
    policy({key: value.to("meta") for key, value in batch.items()}).total.backward()
    assert all(gradient.shape == policy.get_parameter(key).shape for key, gradient in gradients(policy).items())


@every
@pytest.mark.parametrize("cams", [1, 4])
def test_every_trainable_parameter_gets_a_gradient_that_is_not_zero(name, cams, awake):
    policy, batch = awake(name, cams=cams)
    policy(batch).total.backward()
    assert [key for key, gradient in gradients(policy).items() if gradient is None or not gradient.any()] == []


@every
def test_every_trainable_parameter_is_in_the_graph_without_any_optional_input(name):
    """DDP waits for the gradient of every parameter in every step."""
    policy = build(name)
    batch = make_batch(policy.batch_spec(), 2)
    for field in ("response_mask", "memory_mask", "metadata_mask", "subgoal_mask", "fast_mask"):
        if field in batch:
            batch[field][:] = False
    policy(batch).total.backward()
    assert [key for key, gradient in gradients(policy).items() if gradient is None or not gradient.isfinite().all()] == []


@pytest.mark.parametrize("name", in_tiers(POLICIES, NETWORKS.__contains__))
def test_it_overfits_a_batch(name):
    """The loss falls to a tenth in 200 steps."""
    policy = build(name)
    batch = make_batch(policy.batch_spec(), 2)
    policy.eval()  # drops no inputs, so that the targets stay the same
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200, 1e-4)
    start = policy(batch).total.item()
    for step in range(200):
        optimizer.zero_grad()
        total = policy(batch).total
        if step > 20 and total.item() < start / 10:
            break
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert policy(batch).total.item() < start / 10


@every
def test_the_same_batch_gives_the_same_loss_and_gradients_bit_for_bit(name, awake):
    """Compare two trainings, of which other tests share the first."""
    results = []
    for policy, batch in (awake(name), policy_batches.awake(name)):
        state = torch.get_rng_state()
        losses = policy(batch)
        losses.total.backward()
        assert torch.equal(state, torch.get_rng_state())  # no randomness outside the batch
        results.append((losses.total, gradients(policy)))
    (first_total, first_gradients), (second_total, second_gradients) = results
    assert torch.equal(first_total, second_total)
    assert all(torch.equal(first_gradients[key], second_gradients[key]) for key in first_gradients)


@every
def test_a_batch_of_four_has_the_mean_loss_and_gradient_of_four_batches_of_one(name, awake):
    policy, batch = awake(name)
    losses = policy(batch)
    losses.total.backward()
    expected = copy.deepcopy(gradients(policy))
    policy.zero_grad()
    singles = [policy({key: value[i : i + 1] for key, value in batch.items()}).total for i in range(4)]
    torch.stack(singles).mean().backward()
    torch.testing.assert_close(torch.stack(singles).mean(), losses.total, rtol=1e-5, atol=0)
    for key, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-3, atol=1e-5, msg=key)


@every
def test_eager_and_sdpa_give_the_same_loss_and_gradients(name, awake):
    policy, batch = awake(name, attention="eager")
    sdpa = build(name, attention="sdpa")
    sdpa.load_state_dict(policy.state_dict())
    totals = [model(batch).total for model in (policy, sdpa)]
    for total in totals:
        total.backward()
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-5, atol=0)
    for key, gradient in gradients(policy).items():
        torch.testing.assert_close(gradients(sdpa)[key], gradient, rtol=1e-3, atol=1e-5, msg=key)


@every
@pytest.mark.usefixtures("compiling")
def test_flex_attention_gives_the_same_loss_from_its_block_mask(name, awake):
    """Only forward is compared, because FlexAttention has no backward on a CPU, where its forward runs uncompiled."""
    policy, batch = awake(name)
    flex = build(name, attention="flex")
    flex.load_state_dict(policy.state_dict())
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(flex(batch).total, policy(batch).total, rtol=1e-5, atol=0)


@every
def test_checkpointing_recomputes_every_unit_and_changes_no_bit(name, awake):
    results = []
    for checkpointing in (False, True):
        policy, batch = awake(name, checkpointing=checkpointing)
        calls: Counter[torch.nn.Module] = Counter()
        units = [module for module in policy.modules() if isinstance(module, policy.layer_units())]
        inner = [next(child for child in unit.modules() if not list(child.children())) for unit in units]
        for module in (*units, *inner):
            module.register_forward_hook(lambda module, *_, calls=calls: calls.update([module]))
        losses = policy(batch)
        before = Counter(calls)
        losses.total.backward()
        for unit, leaf in zip(units, inner, strict=True):
            assert calls[unit] == before[unit] > 0, "backward must not call a unit again, which would gather it again"
            assert calls[leaf] == before[leaf] * (2 if checkpointing else 1)
        results.append((losses.total, gradients(policy)))
    (plain, plain_gradients), (recomputed, recomputed_gradients) = results
    assert torch.equal(plain, recomputed)
    assert all(torch.equal(plain_gradients[key], recomputed_gradients[key]) for key in plain_gradients)


@every
def test_asking_for_per_sample_losses_changes_no_bit_of_the_loss_and_they_add_up_to_it(name, awake):
    policy, batch = awake(name)
    plain, detailed = policy(batch), policy(batch, per_sample=True)
    assert plain.per_sample is None
    assert torch.equal(plain.total, detailed.total)
    if name == WITHOUT_SAMPLE_LOSSES:
        assert detailed.per_sample is detailed.sample_losses is None
        return
    assert detailed.per_sample
    assert detailed.sample_losses.shape == (4,)
    torch.testing.assert_close(detailed.sample_losses.mean(), detailed.total)
    for key, (total, number) in detailed.per_sample.items():
        assert total.shape == number.shape == (4,)
        has_term = number > 0
        torch.testing.assert_close((total / number)[has_term].sum() / max(has_term.sum(), 1), detailed.parts[key])
        assert detailed.counts[key] == has_term.sum()


@every
def test_bfloat16_parameters_give_a_float32_loss_near_that_of_float32(name, awake):
    policy, batch = awake(name)
    expected = policy(batch).total
    low = copy.deepcopy(policy).to(torch.bfloat16)
    losses = low(batch)
    losses.total.backward()
    assert losses.total.dtype == torch.float32
    assert {gradient.dtype for gradient in gradients(low).values()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in low.buffers()} <= {torch.float32, torch.int64}
    torch.testing.assert_close(losses.total, expected, rtol=2e-2, atol=0)


@every
@pytest.mark.parametrize("checkpointing", [False, True])
def test_autocast_leaves_gradients_in_float32(name, checkpointing, awake):
    policy, batch = awake(name, checkpointing=checkpointing)
    expected = policy(batch).total
    with torch.autocast("cpu", torch.bfloat16):
        total = policy(batch).total
    total.backward()
    assert {gradient.dtype for gradient in gradients(policy).values()} == {torch.float32}
    torch.testing.assert_close(total, expected, rtol=2e-2, atol=0)


@every
def test_every_parameter_has_a_role_and_belongs_to_one_module(name):
    policy = build(name)
    roles = policy.parameter_roles()
    assert list(roles) == [key for key, _ in policy.named_parameters()]
    assert len(roles) == len(list(policy.named_parameters(remove_duplicate=False)))
    assert {role.tower for role in roles.values()} >= {"backbone"}
    assert any(role.decay for role in roles.values())


@every
def test_a_batch_has_exactly_the_fields_that_the_policy_asks_for(name):
    spec = build(name, cams=2).batch_spec()
    assert sorted(make_batch(spec, 2)) == sorted(spec.fields())


@every
def test_a_missing_field_is_named(name):
    policy = build(name)
    batch = make_batch(policy.batch_spec(), 1)
    del batch["image_mask"]
    with pytest.raises(DataError, match="rank 0 has no 'image_mask'"):
        policy(batch)


@every
def test_select_actions_uses_only_fields_for_acting_and_is_deterministic(name, awake):
    policy, batch = awake(name)
    spec = policy.batch_spec()
    acting_batch = {key: batch[key] for key in spec.fields(acting=True)}
    try:
        actions = policy.select_actions(acting_batch)
    except UnsupportedError:
        assert name in ("pi07_high_level", "value"), "all other policies must act"
        return
    assert actions.shape == (4, spec.horizon, spec.action_dim)
    assert actions.isfinite().all()
    assert torch.equal(policy(acting_batch, act=True), actions)
    acting_batch["noise"] = acting_batch["noise"].flip(0)
    assert not torch.equal(policy(acting_batch, act=True), actions)


@pytest.mark.parametrize("name", ["pi0", "pi05_mem", "pi07_low_level", "vitra"])
def test_states_and_actions_are_each_normalised_by_their_own_statistics(name, awake):
    policy, batch = awake(name)
    before = policy(batch).total

    def statistics(dims, middle, unit):
        values = {"mean": middle, "std": unit, "q01": middle - unit, "q99": middle + unit}
        return {statistic: [value] * dims for statistic, value in values.items()}

    action = statistics(policy.config.action_dim, 0.5, 2.0)
    state = statistics(policy.config.state_dim, 1.0, 4.0)
    policy.load_statistics([{"action": action, "observation.state": state}])
    assert policy.action_normaliser.offset[0, 0].item() == pytest.approx(0.5, abs=1e-5)
    assert policy.state_normaliser.offset[0, 0].item() == pytest.approx(1.0, abs=1e-5)
    raw = {**batch, "action": batch["action"] * 2.0 + 0.5, "state": batch["state"] * 4.0 + 1.0}
    torch.testing.assert_close(policy(raw).total, before, rtol=1e-4, atol=0)
