from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from benchbox_policies.cosmos_droid.config import TASKS
from benchbox_policies.cosmos_droid.latents import TOKEN_DIM, patchify
from benchbox_policies.cosmos_droid.policy import BASE_FPS, LOSS_WEIGHT, MARGIN, CosmosDroid, build
from benchbox_policies.cosmos_droid.times import waver_time

from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import find_policies
from tests.support.policy_batches import build as build_preset
from tests.support.policy_batches import gradients, make_batch

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch

WIDTH, LAYERS, MLP, WORDS, ACTION = 4096, 36, 12288, 151936, 64
modes = pytest.mark.parametrize("mode", [*TASKS, "joint"])


def with_preset(changes: dict[str, object], **axes: object) -> CosmosDroid:
    torch.manual_seed(0)
    return build({**find_policies()["cosmos_droid"].presets["tiny"], **changes}, Axes(**axes))


def in_mode(mode: str, **axes: object) -> tuple[CosmosDroid, Batch]:
    policy = with_preset({}, mode=mode, **axes)
    return policy, make_batch(policy.batch_spec(), 6)


def test_full_is_two_sets_of_qwen3_8b_layers_and_one_text_embedding():
    """Their 14.55 B become the published 16 B with a text head (0.62 B) and Qwen3-VL's vision tower (0.58 B).

    The head has layers of latents and times, and those of actions in 32 domains.
    """
    layer = 2 * WIDTH * 4096 + 2 * WIDTH * 1024 + 3 * WIDTH * MLP + 2 * WIDTH + 2 * 128
    with torch.device("meta"):
        policy = build_preset("cosmos_droid", "full")
    sizes: dict[str, int] = {}
    for name, role in policy.parameter_roles().items():
        sizes[role.tower] = sizes.get(role.tower, 0) + policy.get_parameter(name).numel()
    assert sizes == {
        "backbone": LAYERS * layer + WORDS * WIDTH,
        "expert": LAYERS * layer + WIDTH,
        "head": (
            (2 * WIDTH * TOKEN_DIM + WIDTH + TOKEN_DIM)
            + (256 * WIDTH + WIDTH + WIDTH**2 + WIDTH)
            + (32 * (2 * WIDTH * ACTION + WIDTH + ACTION) + WIDTH)
        ),
    }
    assert sum(sizes.values()) == 14_550_802_624


def test_only_the_generating_stream_trains():
    """It has 6.98 B of `full`; the text embedding and the 36 layers that read the prompt are frozen, as in the recipe."""
    with torch.device("meta"):
        policy = build_preset("cosmos_droid", "full")
    roles = policy.parameter_roles()
    trained = {name: parameter.numel() for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert set(trained) == {name for name, role in roles.items() if role.part == "head"}
    assert not any(".backbone." in name or name.startswith("model.vocabulary") for name in trained)
    assert sum(trained.values()) == 6_982_401_216


def test_a_chunk_of_32_steps_has_33_frames_in_nine_latents_of_48_channels():
    with torch.device("meta"):
        spec = build_preset("cosmos_droid", "full", cams=2).batch_spec()
    assert (spec.horizon, spec.future) == (32, 32)
    assert spec.latent_shape == (8, 2, 48, spec.image_size[0] // 16, spec.image_size[1] // 16)


@pytest.mark.parametrize(
    ("mode", "denoised"), [("policy", "both"), ("forward_dynamics", "vision"), ("inverse_dynamics", "action")]
)
def test_losses_of_a_mode_count_only_the_parts_that_it_denoises(mode, denoised):
    policy, batch = in_mode(mode)
    losses = policy(batch, per_sample=True)
    for name, (error, count) in losses.per_sample.items():
        assert bool((count > 0).all()) == (denoised in ("both", name))
        assert bool((error > 0).all()) == (denoised in ("both", name))
        assert bool(losses.parts[name] > 0) == (denoised in ("both", name))
    if denoised != "vision":
        with_state = (1 + (~batch["action_is_pad"]).sum(dim=1)) * 7
        assert torch.equal(losses.per_sample["action"][1], with_state.float())
    if denoised != "action":
        assert set(losses.per_sample["vision"][1].tolist()) == {12.0 * TOKEN_DIM}, "current and future frame have 6 tokens each"


@modes
def test_in_every_mode_every_trainable_parameter_is_in_the_graph(mode):
    """A head whose loss is zero still has a gradient of zeros, because DDP waits for it."""
    policy, batch = in_mode(mode)
    policy(batch).total.backward()
    by_name = gradients(policy)
    assert [name for name, gradient in by_name.items() if gradient is None] == []
    without_gradient = {name for name, gradient in by_name.items() if not gradient.any()}
    heads = {
        "forward_dynamics": {"action_out.weight.weight", "action_out.bias.weight"},
        "inverse_dynamics": {"latent_out.weight", "latent_out.bias"},
    }
    assert without_gradient == heads.get(mode, set())


def test_the_joint_mode_chooses_a_mode_for_each_sample_by_its_uniform_number():
    policy, batch = in_mode("joint")
    uniform = torch.rand(30_000, 3, generator=torch.Generator().manual_seed(0))
    future, action = policy.condition_mask(uniform).unbind(dim=1)
    assert not (future & action).any()
    for mode_mask in (future, action, ~(future | action)):
        assert mode_mask.float().mean() == pytest.approx(1 / 3, abs=0.01)
    batch["uniform"][:, 2] = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.7, 0.999])
    together = policy(batch, per_sample=True).per_sample
    for index, mode in enumerate(TASKS):
        single_mode, _ = in_mode(mode)
        single_mode.load_state_dict(policy.state_dict())
        rows = {key: value[2 * index : 2 * index + 2] for key, value in batch.items()}
        for name, (error, count) in single_mode(rows, per_sample=True).per_sample.items():
            torch.testing.assert_close(together[name][0][2 * index : 2 * index + 2], error)
            assert torch.equal(together[name][1][2 * index : 2 * index + 2], count)


@pytest.mark.parametrize(
    ("mode", "noise", "data"),
    [("forward_dynamics", "noise", "action"), ("inverse_dynamics", "latent_noise", "future_images")],
)
def test_conditions_have_no_noise(mode, noise, data):
    policy, batch = in_mode(mode)
    batch["action_is_pad"][:] = False
    total = policy(batch).total
    assert torch.equal(policy({**batch, noise: batch[noise].flip(0)}).total, total)
    assert not torch.equal(policy({**batch, data: batch[data].flip(0)}).total, total)


def test_both_terms_are_ten_times_the_mean_squared_error_over_conditions_too():
    """The mean is over two frames, one of them the current one, and over four steps and the state."""
    policy, batch = in_mode("policy")
    for head in (policy.latent_out, policy.action_out):
        for parameter in head.parameters():
            torch.nn.init.zeros_(parameter)
    batch["action_is_pad"][:] = False
    batch |= {key: torch.zeros_like(batch[key]) for key in ("action", "noise", "latent_noise")}
    batch["noise"][..., 3] = 1.0  # one of seven dimensions
    batch["future_images"] = torch.full_like(batch["future_images"], 255)
    parts = policy(batch).parts
    assert LOSS_WEIGHT == 10.0
    assert parts["action"].item() == pytest.approx(10.0 / 7 * 4 / 5)
    assert parts["vision"].item() == pytest.approx(10.0 * (127.5 / 64) ** 2 / 2)


def test_future_and_actions_have_the_time_of_the_first_uniform_number():
    """With data of 0 and noise of 1 the noisy tokens are the times."""
    policy, batch = in_mode("policy")
    batch["uniform"][:, 0] = torch.tensor([0.0, 0.1, 0.5, 0.7, 0.9, 0.999])
    batch["future_images"] = torch.full_like(batch["future_images"], 255)
    batch |= {"action": torch.zeros_like(batch["action"]), "noise": torch.ones_like(batch["noise"])}
    batch["latent_noise"] = torch.ones_like(batch["latent_noise"])
    inputs = []
    policy.latent_in.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    policy.action_in.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    policy(batch)
    actions, _, future = inputs
    time, white = waver_time(batch["uniform"][:, 0], 5.0), (255 - 127.5) / 64
    assert time[2].item() == pytest.approx(5 / 6)
    torch.testing.assert_close(actions[:, 1:, :7], time[:, None, None].expand(-1, 4, 7))
    torch.testing.assert_close(future, (time + (1 - time) * white)[:, None, None].expand_as(future))


@pytest.mark.parametrize("dims", [7, 32])
def test_actions_are_zero_beyond_the_dimensions_of_the_dataset_when_training_and_acting(dims):
    policy, batch = in_mode("policy")
    batch["action_dim_mask"] = (torch.arange(32) < dims).expand(6, -1)
    inputs = []
    policy.action_in.register_forward_pre_hook(lambda _, args: inputs.append(args[0][:, 1:]))
    policy(batch)
    actions = policy.select_actions(batch)
    assert len(inputs) == 1 + 2 * policy.config.denoising_steps
    for action in (*inputs, actions):
        assert action[..., :dims].any(dim=(0, 1)).all()
        assert not action[..., dims:].any()


@pytest.mark.parametrize("field", ["image_mask", "future_mask"])
def test_masked_frames_are_neither_attended_to_nor_counted(field):
    """Masked are one of two cameras, or the last frames of the future."""
    policy, batch = in_mode("policy", cams=2)
    if field == "image_mask":
        batch[field][:, :, 1] = False
        masked = (slice(None), slice(None), 1)
    else:
        batch[field][:, 3:] = False  # of the four frames of its only latent
        masked = (slice(None),)
    counts = {"image_mask": 12.0 * TOKEN_DIM, "future_mask": 0.0}
    losses = policy(batch, per_sample=True)
    assert set(losses.per_sample["vision"][1].tolist()) == {counts[field]}
    changed = {key: value.clone() for key, value in batch.items()}
    for name in ("images", "future_images") if field == "image_mask" else ("future_images",):
        changed[name][masked] = 255 - changed[name][masked]
    assert torch.equal(policy(changed).total, losses.total)
    batch[field][:] = changed[field][:] = True
    assert not torch.equal(policy(changed).total, policy(batch).total)


def test_positions_follow_frames_in_time_and_place_cameras_side_by_side():
    """At 15 fps latent frames are 24 / 15 positions apart; steps are between them, after the state at frame 0."""
    policy, batch = in_mode("policy", cams=2)
    conditioning = policy.conditioning(batch, policy.latents(batch)[:, :1], batch["future_mask"])
    time, row, column = conditioning.positions[0].double().unbind(dim=-1)
    begin = batch["prompt_mask"][0].sum().item() + MARGIN
    time = (time / policy.stretch - begin) / (BASE_FPS / 15)
    assert time.tolist() == pytest.approx([0.0] * 12 + [1.0] * 12 + [0.0, 0.25, 0.5, 0.75, 1.0])
    assert (row / policy.stretch).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 4 + [0.0] * 5
    assert (column / policy.stretch).tolist() == ([0.0, 1.0, 2.0] * 2 + [3.0, 4.0, 5.0] * 2) * 2 + [0.0] * 5


@torch.no_grad()
def test_velocities_belong_to_their_tokens():
    """If layers add nothing, changing one future token or one step changes only its own velocity."""
    policy, batch = in_mode("policy")
    for layer in policy.model.layers:
        for branch in (layer.expert.output, layer.expert.mlp.down):
            torch.nn.init.zeros_(branch.weight)
    conditioning = policy.conditioning(batch, policy.latents(batch)[:, :1], batch["future_mask"])
    future, action = patchify(batch["latent_noise"]), batch["noise"][:, 0]
    time, condition_mask = torch.ones(6), torch.zeros(6, 2, dtype=torch.bool)
    before = policy.velocity(conditioning, future, action, time, condition_mask)
    for part, token in ((0, 4), (1, 2)):
        inputs = [future.clone(), action.clone()]
        inputs[part][:, token] += 1.0
        for index, (old, new) in enumerate(
            zip(before, policy.velocity(conditioning, *inputs, time, condition_mask), strict=True)
        ):
            changed = (old != new).all(dim=2)
            assert changed.any(dim=0).nonzero().flatten().tolist() == ([token] if index == part else [])


@torch.no_grad()
@pytest.mark.parametrize(("conditions", "noisy"), [((False, False), (True, True)), ((True, False), (False, True))])
def test_the_time_is_embedded_in_noisy_tokens_and_not_in_conditions(conditions, noisy):
    policy, batch = in_mode("policy")
    conditioning = policy.conditioning(batch, policy.latents(batch)[:, :1], batch["future_mask"])
    tokens, condition_mask = (patchify(batch["latent_noise"]), batch["noise"][:, 0]), torch.tensor([conditions]).expand(6, -1)
    hidden = []
    policy.model.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[1].hidden))
    for time in (0.5, 0.6):
        policy.velocity(conditioning, *tokens, torch.full((6,), time), condition_mask)
    changed = (hidden[0] != hidden[1]).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert changed == [*range(6, 12)] * noisy[0] + [*range(13, 17)] * noisy[1]
    current, state = policy.latent_in(conditioning.current), policy.action_in(conditioning.state, 8)
    torch.testing.assert_close(hidden[0][:, :6], current)
    torch.testing.assert_close(hidden[0][:, 12:13], state + policy.action_modality.weight)


def test_state_and_actions_use_the_weights_of_droid_and_all_weights_are_in_the_graph():
    policy, batch = in_mode("policy")
    assert policy.config.domain == 8
    policy(batch).total.backward()
    for layer in (policy.action_in, policy.action_out):
        for table in (layer.weight, layer.bias):
            assert len(table.weight) == 32
            assert table.weight.grad.any(dim=1).nonzero().flatten().tolist() == [8]
    other_domain = with_preset({"domain": 5})
    other_domain.load_state_dict(policy.state_dict())
    assert other_domain(batch).total != policy(batch).total


def test_training_drops_one_prompt_in_ten_by_its_uniform_number():
    policy, batch = in_mode("policy")
    batch["uniform"][:, 1] = torch.tensor([0.0, 0.099, 0.1, 0.5, 0.9, 0.999])
    changed = {**batch, "prompt_tokens": (batch["prompt_tokens"] + 1) % 384}
    for dropped in ([True, True, False, False, False, False], [False] * 6):  # training, validation
        losses = [policy(values, per_sample=True).per_sample for values in (batch, changed)]
        for name in ("vision", "action"):
            assert (losses[0][name][0] == losses[1][name][0]).tolist() == dropped
        policy.eval()
    assert all(gradient.isfinite().all() for gradient in gradients(policy).values() if gradient is not None)


def test_a_batch_whose_prompts_are_all_dropped_trains():
    policy, batch = in_mode("policy")
    batch["uniform"][:, 1] = 0.0
    policy(batch).total.backward()
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients(policy).values())


def test_the_prompt_is_causal():
    policy, batch = in_mode("policy")
    text = policy.conditioning(batch, policy.latents(batch)[:, :1], batch["future_mask"]).text
    assert text.groups.tolist() == list(range(1, 49))


@pytest.mark.parametrize("field", ["images", "prompt_tokens", "state"])
def test_every_conditioning_input_reaches_future_and_actions(field, awake):
    policy, batch = awake("cosmos_droid")
    before, after = policy(batch).parts, policy({**batch, field: batch[field].flip(0)}).parts
    assert all(not torch.equal(before[name], after[name]) for name in ("vision", "action"))


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_select_actions_integrates_guided_velocities_of_both_parts_and_computes_prompts_once(guidance, awake):
    """Guidance extrapolates from a dropped prompt towards the prompt, for future and actions."""
    with torch.enable_grad():
        policy, batch = awake("cosmos_droid", cams=2)
    batch["action_dim_mask"] = torch.ones_like(batch["action_dim_mask"])
    assert policy.config.guidance == 3.0
    policy.config = replace(policy.config, guidance=guidance)
    steps, scales = policy.config.denoising_steps, (guidance, 1 - guidance)[: 1 + (guidance != 1)]
    prefills = []
    policy.model.layers[0].backbone.key.register_forward_hook(lambda *_: prefills.append(1))
    selected = policy.select_actions(batch)
    assert len(prefills) == len(scales), "prompt and dropped prompt are computed once"
    current, future_mask = policy.latents(batch)[:, :1], torch.ones_like(batch["future_mask"])
    dropped = {**batch, "prompt_mask": torch.zeros_like(batch["prompt_mask"])}
    conditionings = [policy.conditioning(prompt, current, future_mask) for prompt in (batch, dropped)]
    future, action = patchify(batch["latent_noise"]), batch["noise"][:, 0]
    for step in range(steps):
        time, condition_mask = torch.full((4,), 1 - step / steps), torch.zeros(4, 2, dtype=torch.bool)
        velocities = [policy.velocity(layout, future, action, time, condition_mask) for layout in conditionings]
        future_v, action_v = (
            sum(scale * part for scale, part in zip(scales, parts, strict=False)) for parts in zip(*velocities, strict=True)
        )
        future, action = future - future_v / steps, action - action_v / steps
    torch.testing.assert_close(selected, action, rtol=1e-4, atol=1e-5)


def test_states_and_selected_actions_are_in_raw_units_of_the_dataset(awake):
    """DROID is not normalised."""
    action = {"mean": [5.0] * 7, "std": [2.0] * 7}
    statistics = [{"action": action, "observation.state": {"mean": [3.0] * 7, "std": [4.0] * 7}}]
    trained, batch = awake("cosmos_droid")
    scaled = {**batch, "state": batch["state"] * torch.where(torch.arange(32) < 7, 4.0, 1.0)}
    scaled["state"][..., :7] += 3.0
    before = {}
    for mode in ("identity", "mean_std"):
        policy = with_preset({"normalisation": mode})
        policy.load_state_dict(trained.state_dict())
        policy.load_statistics(statistics)
        assert (policy.spec.state_normalisation, policy.spec.action_normalisation) == (mode, mode)
        before[mode] = policy.select_actions(batch if mode == "identity" else scaled)[..., :7]
    assert trained.config.normalisation == "identity"
    torch.testing.assert_close(before["mean_std"], before["identity"] * 2.0 + 5.0, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["forward_dynamics", "inverse_dynamics"])
def test_modes_that_are_not_trained_to_act_refuse_to(mode):
    policy, batch = in_mode(mode)
    with pytest.raises(UnsupportedError, match=mode):
        policy.select_actions(batch)


@pytest.mark.parametrize("wrong", [{"mode": "joint"}, {"horizon": 6}, {"image": [64, 100]}])
def test_an_invalid_preset_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        build({**find_policies()["cosmos_droid"].presets["tiny"], **wrong}, Axes())


def test_the_text_layers_are_the_backbone_and_the_generating_layers_the_expert():
    """Training only the expert is then the same as in the published recipe."""
    roles = build_preset("cosmos_droid").parameter_roles()
    assert roles["action_in.weight.weight"].decay, "a table of matrices"
    assert not roles["action_in.bias.weight"].decay
    backbone = {name for name, role in roles.items() if role.part == "backbone"}
    assert backbone == {name for name in roles if ".backbone." in name or name == "model.vocabulary.weight"}
    assert {role.tower for role in roles.values()} == {"backbone", "expert", "head"}
