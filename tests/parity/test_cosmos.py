"""cosmos_droid against formulas written from the facts of Cosmos 3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scipy.stats
import torch
from benchbox_policies._layers.nn.timestep import embed_timestep
from benchbox_policies.cosmos_droid.domains import DomainLinear
from benchbox_policies.cosmos_droid.latents import TOKEN_DIM, patchify
from benchbox_policies.cosmos_droid.policy import build as build_cosmos
from benchbox_policies.cosmos_droid.times import waver_time

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import find_policies
from tests.reference import cosmos as reference
from tests.support.policy_batches import make_batch, wake

PEER = "formulas of Cosmos 3"
DIMS = 7  # of actions in the batch
# Both models compute rotary angles in float32, where positions above 15,000 round them by up to 5e-4. The formulas compute them
# in float64. With angles rounded alike, all differences are below 5e-7.
ROTARY_BOUND = 5e-5
NAMES = {
    "model.vocabulary.weight": "embed_tokens.weight",
    "model.expert_norm.weight": "norm_moe_gen.weight",
    "action_in.weight.weight": "action2llm.fc.weight",
    "action_in.bias.weight": "action2llm.bias.weight",
    "action_out.weight.weight": "llm2action.fc.weight",
    "action_out.bias.weight": "llm2action.bias.weight",
}
LINEAR_NAMES = {
    "latent_in": "vae2llm",
    "latent_out": "llm2vae",
    "time_in": "time_embedder.mlp.0",
    "time_out": "time_embedder.mlp.2",
}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
modes = pytest.mark.parametrize("mode", ["policy", "forward_dynamics", "inverse_dynamics"])


@torch.enable_grad()
def cosmos(mode="policy", size=3):
    """Return a tiny policy with every parameter changed from its initial value, and a batch with prompts of several lengths."""
    torch.manual_seed(0)
    policy = build_cosmos({**find_policies()["cosmos_droid"].presets["tiny"]}, Axes(attention="eager", mode=mode))
    batch = make_batch(policy.batch_spec(), size)
    batch["action_is_pad"][:] = False
    batch["action"][..., DIMS:] = batch["state"][..., DIMS:] = 0.0
    wake(policy, batch)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    policy.load_statistics([{"action": {"mean": [0.0] * DIMS}, "observation.state": {}}])
    return policy, batch


def peer_weights(policy):
    """Return the policy's parameters under the names of Cosmos 3, connected to them for gradients."""
    ours = dict(policy.named_parameters())
    weights = {theirs: ours[name] for name, theirs in NAMES.items()}
    weights |= {
        f"{theirs}.{suffix}": ours[f"{name}.{suffix}"] for name, theirs in LINEAR_NAMES.items() for suffix in ("weight", "bias")
    }
    weights["action_modality_embed"] = ours["action_modality.weight"][0]
    for index in range(policy.config.model.depth):
        for stream, suffix in (("backbone", ""), ("expert", "_moe_gen")):
            weights |= {
                f"layers.{index}.{theirs}{suffix}.weight": ours[f"model.layers.{index}.{stream}.{name}.weight"]
                for name, theirs in LAYER_NAMES.items()
            }
    return weights


def sizes(policy):
    config = policy.config
    return reference.Sizes(
        depth=config.model.depth,
        heads=config.model.heads,
        kv_heads=config.model.kv_heads,
        rope_base=config.model.rope_base,
        fps=config.fps,
    )


def make_sample(policy, batch, index, frames, actions):
    """Return sample `index` of the batch with these frames (G, P, C) and actions (1 + N, A), as Cosmos 3 packs it."""
    mode, (height, width) = policy.mode, policy.config.image
    return reference.Sample(
        tokens=batch["prompt_tokens"][index][batch["prompt_mask"][index] & ~dropped(policy, batch)[index]],
        frames=frames,
        grid=(height // 32, width // 32),
        actions=actions,
        domain=policy.config.domain,
        noisy_frames=mode != "inverse_dynamics",
        noisy_actions=mode != "forward_dynamics",
    )


def dropped(policy, batch):
    return (batch["uniform"][:, 1] < 0.1) & policy.training


def reference_step(policy, batch):
    """Return velocities, targets and noisy masks of all samples of a training step, of frames and of actions."""
    weights, time = peer_weights(policy), reference.train_time(batch["uniform"][:, 0], 5.0).float()
    latents = policy.latents(batch)
    patches = [patchify(part).unflatten(1, (part.shape[1], -1)) for part in (latents, batch["latent_noise"])]
    step = {name: ([], [], []) for name in ("vision", "action")}
    for index in range(len(time)):
        clean = {"vision": patches[0][index], "action": torch.cat((batch["state"][index, -1:], batch["action"][index]))}
        noise = {"vision": patches[1][index], "action": batch["noise"][index, 0]}
        masks = dict(zip(clean, reference.noisy_masks(make_sample(policy, batch, index, *clean.values())), strict=True))
        noisy = {}
        for name, values in clean.items():
            padded = torch.cat((torch.zeros_like(values[:1]), noise[name]))  # the condition has no noise
            noisy[name], target = reference.add_noise(values, padded, time[index], masks[name])
            step[name][1].append(target)
            step[name][2].append(masks[name])
        noisy["action"][:, DIMS:] = 0.0
        sample = make_sample(policy, batch, index, *noisy.values())
        for name, velocity in zip(noisy, reference.velocity(weights, sizes(policy), sample, time[index]), strict=True):
            step[name][0].append(velocity)
    return step


def reference_losses(step):
    """Return the loss of each part, unweighted."""
    widths = {"vision": TOKEN_DIM, "action": DIMS}
    return {
        name: reference.flow_loss(*lists, [widths[name]] * len(lists[0])) for name, lists in step.items() if lists[2][0].any()
    }


def test_times_are_those_of_cosmos_and_so_is_their_distribution(parity):
    uniform = torch.linspace(0, 1, 10_001)[:-1]
    ours, theirs = waver_time(uniform, 5.0), reference.train_time(uniform, 5.0)
    parity.compare("cosmos_droid", PEER, "times of training", ours, theirs)
    drawn = reference.train_time(torch.rand(100_000, generator=torch.Generator().manual_seed(0)), 5.0)
    parity.compare("cosmos_droid", PEER, "median time", ours.median(), drawn.median(), bound=5e-3)
    assert scipy.stats.ks_2samp(ours.numpy(), drawn.numpy()).statistic < 0.01


def test_the_embedding_of_times_is_that_of_cosmos(parity):
    time = torch.linspace(0, 1, 101)
    parity.compare("cosmos_droid", PEER, "time embedding", embed_timestep(time, 256), reference.time_embedding(time))


@torch.no_grad()
def test_action_layers_are_those_of_each_sample_s_domain(parity):
    torch.manual_seed(0)
    layer, x, domain = DomainLinear(32, 64, 32), torch.randn(5, 4, 32), torch.tensor([0, 8, 31, 8, 15])
    torch.nn.init.normal_(layer.bias.weight)
    weights = {"action2llm.fc.weight": layer.weight.weight, "action2llm.bias.weight": layer.bias.weight}
    ours = torch.stack([layer(sample, index) for sample, index in zip(x, domain.tolist(), strict=True)])
    parity.compare("cosmos_droid", PEER, "action layers", ours, reference.domain_linear(weights, "action2llm", x, domain))


@modes
def test_velocities_losses_and_gradients_are_those_of_cosmos(parity, mode):
    """The second prompt is dropped."""
    policy, batch = cosmos(mode)
    batch["uniform"][:, 1] = torch.tensor([0.5, 0.05, 0.9])
    velocities = []
    heads = {"vision": policy.latent_out, "action": policy.action_out}
    for head in heads.values():
        head.register_forward_hook(lambda _, __, output: velocities.append(output))
    policy.zero_grad()
    losses = policy(batch)
    losses.total.backward()
    ours = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad(set_to_none=True)
    step = reference_step(policy, batch)
    expected = reference_losses(step)
    total = sum(10 * loss for loss in expected.values())
    total.backward()
    assert set(expected) == {"policy": {"vision", "action"}, "forward_dynamics": {"vision"}}.get(mode, {"action"})
    for name, velocity in zip(heads, velocities[:2], strict=True):
        if name in expected:
            theirs = torch.stack([predicted[1:] for predicted in step[name][0]]).flatten(1, -2)
            parity.compare("cosmos_droid", PEER, f"velocity of {name}, {mode}", velocity, theirs, bound=ROTARY_BOUND)
            parity.compare("cosmos_droid", PEER, f"loss of {name}, {mode}", losses.parts[name], 10 * expected[name])
        else:
            assert losses.parts[name] == 0
    parity.compare("cosmos_droid", PEER, f"loss, {mode}", losses.total, total)
    theirs = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    unused = {name for name in ours if not ours[name].any()}  # of the head without a loss
    assert ours.keys() - unused == theirs.keys() - unused
    joined = [torch.cat([values[name].flatten() for name in ours if name not in unused]) for values in (ours, theirs)]
    parity.compare("cosmos_droid", PEER, f"gradients, {mode}", *joined, bound=ROTARY_BOUND)


@torch.no_grad()
def test_actions_are_integrated_with_the_guided_velocity_of_cosmos(parity):
    policy, batch = cosmos()
    policy.eval()
    steps, guidance, weights = policy.config.denoising_steps, policy.config.guidance, peer_weights(policy)
    current = patchify(policy.latents({"images": batch["images"]}))
    expected = []
    for index in range(len(current)):
        future = patchify(batch["latent_noise"])[index].unflatten(0, (-1, current.shape[1]))
        actions = batch["noise"][index, 0].clone()
        actions[:, DIMS:] = 0.0
        for step in range(steps):
            frames = torch.cat((current[index][None], future))
            sample = make_sample(policy, batch, index, frames, torch.cat((batch["state"][index, -1:], actions)))
            time = torch.tensor(1 - step / steps)
            unguided = reference.velocity(weights, sizes(policy), replace(sample, tokens=sample.tokens[:0]), time)
            guided = reference.velocity(weights, sizes(policy), sample, time)
            future_v, action_v = (u + guidance * (c - u) for c, u in zip(guided, unguided, strict=True))
            future, actions = future - future_v[1:] / steps, actions - action_v[1:] / steps
            actions[:, DIMS:] = 0.0
        expected.append(actions)
    ours = policy.select_actions(batch)
    parity.compare("cosmos_droid", PEER, "sampled actions", ours, torch.stack(expected), bound=ROTARY_BOUND)
