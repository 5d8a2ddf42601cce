"""VITRA against formulas written from its facts, and its condition token against the Gemma 2 of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from benchbox_policies.vitra.diffusion import add_noise, alpha_bars
from benchbox_policies.vitra.policy import build as build_vitra

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import find_policies
from tests.reference import vitra as reference
from tests.support.policy_batches import make_batch, wake

PEER = "formulas of VITRA"
HAND_DIMS = 102
# Our names and VITRA's. The modulations of a layer are one matrix there.
NAMES = {
    "condition_in": "z_embedder.linear",
    "time_in.0": "t_embedder.mlp.0",
    "time_in.2": "t_embedder.mlp.2",
    "state_in.0": "state_embedder.projector.0",
    "state_in.2": "state_embedder.projector.2",
    "state_in.4": "state_embedder.projector.4",
    "action_in.0": "x_embedder.projector.0",
    "action_in.2": "x_embedder.projector.2",
    "norm.modulation": "final_layer.adaLN_modulation.1",
    "action_out": "final_layer.linear",
}
LAYER_NAMES = {
    "query_key_value": "attn.qkv",
    "query_norm": "attn.q_norm",
    "key_norm": "attn.k_norm",
    "output": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


@torch.enable_grad()
def vitra(size=1, **changes):
    """Return a tiny policy with every parameter changed from its initial value, and a batch of both hands."""
    torch.manual_seed(0)
    policy = build_vitra({**find_policies()["vitra"].presets["tiny"], **changes}, Axes(attention="eager"))
    batch = make_batch(policy.batch_spec(), size)
    batch["action_dim_mask"] = (torch.arange(192) < HAND_DIMS).expand(size, -1).clone()
    wake(policy, batch)
    with torch.no_grad():
        for parameter in policy.dit.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return policy, batch


def peer_weights(dit):
    """Return the parameters of the transformer under VITRA's names, connected to them for gradients."""
    ours, weights = dict(dit.named_parameters()), {"positional_embedding": dit.position}
    for suffix in ("weight", "bias"):
        weights |= {f"{theirs}.{suffix}": ours[f"{name}.{suffix}"] for name, theirs in NAMES.items()}
        for index in range(len(dit.layers)):
            layer = f"layers.{index}"
            weights |= {
                f"blocks.{index}.{theirs}.{suffix}": ours[f"{layer}.{name}.{suffix}"]
                for name, theirs in LAYER_NAMES.items()
                if f"{layer}.{name}.{suffix}" in ours
            }
            norms = [ours[f"{layer}.{norm}.modulation.{suffix}"] for norm in ("attention_norm", "mlp_norm")]
            weights[f"blocks.{index}.adaLN_modulation.1.{suffix}"] = torch.cat(norms)
    return weights


def chunks(values, draws):
    """Repeat the values (B, ...) of every sample for its chunks: (B * D, ...)."""
    return values.repeat_interleave(draws, dim=0)


def predict(policy, batch, x_t, timestep, condition):
    """Predict the noise in chunks (M, N, A) with VITRA's formula; `timestep` (M,), `condition` (M, W)."""
    draws = len(x_t) // len(batch["action"])
    mask = (batch["action_dim_mask"][:, None] & ~batch["action_is_pad"][..., None]).float()
    state_mask = torch.ones_like(batch["state"][:, -1])
    state = torch.cat((batch["state"][:, -1], state_mask), dim=-1)
    x = torch.cat((x_t * chunks(mask, draws), chunks(mask, draws)), dim=-1)
    return reference.dit(peer_weights(policy.dit), policy.config.dit.heads, x, timestep, condition, chunks(state, draws))


def reference_step(policy, batch):
    """Return condition, predicted noise, noise and mask of all chunks of a training step: (M, W) and three (M, N, A)."""
    draws = policy.config.repeated_samples
    uniform = batch["uniform"]
    timestep = (100 * uniform[:, :draws].double()).floor().long().flatten()
    dropped = uniform[:, draws : 2 * draws].flatten() < 0.1
    condition = chunks(policy.condition(batch, frozenset()), draws)
    condition = torch.where(dropped[:, None], policy.dit.no_condition, condition)
    noise = batch["noise"].flatten(0, 1)
    x_t = reference.add_noise(chunks(batch["action"], draws), noise, timestep, 100)
    predicted = predict(policy, batch, x_t, timestep, condition)
    mask = (batch["action_dim_mask"][:, None] & ~batch["action_is_pad"][..., None]).float()
    return predicted, noise, chunks(mask, draws)


def test_the_noise_schedule_and_noisy_actions_are_vitra_s(parity):
    expected = torch.tensor(reference.schedule(100), dtype=torch.float64)
    parity.compare("vitra", PEER, "noise schedule", alpha_bars(100, torch.device("cpu")), expected)
    x_0, noise, timestep = torch.randn(6, 16, 5), torch.randn(6, 16, 5), torch.tensor([0, 1, 40, 60, 98, 99])
    ours = add_noise(x_0[:, None], noise[:, None], timestep[:, None], 100)[:, 0]
    parity.compare("vitra", PEER, "noisy actions", ours, reference.add_noise(x_0, noise, timestep, 100))


@torch.no_grad()
def test_the_diffusion_transformer_predicts_vitra_s_noise(parity):
    policy, batch = vitra(size=3, state_drop=0.0)
    predictions = []
    policy.dit.register_forward_hook(lambda _, __, output: predictions.append(output))
    policy(batch)
    expected, _, _ = reference_step(policy, batch)
    parity.compare("vitra", PEER, "predicted noise", predictions[0].flatten(0, 1), expected)


@pytest.mark.parametrize("robot", [False, True])
def test_loss_and_gradients_of_a_sample_are_vitra_s(parity, robot):
    policy, batch = vitra(state_drop=0.0, weights={"pose": 1.6, "joints": 0.4} if robot else {})
    batch["action_dim_mask"][:, 51:57] = batch["action_dim_mask"][:, 57:] = False
    parts = reference.ROBOT if robot else reference.HUMAN
    policy.zero_grad()
    losses = policy(batch, per_sample=True)
    losses.total.backward()
    ours = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad(set_to_none=True)
    predicted, noise, mask = reference_step(policy, batch)
    expected = reference.loss(predicted, noise, mask, parts)
    expected.backward()
    quantity = "loss of robots" if robot else "loss"
    parity.compare("vitra", PEER, quantity, losses.total, expected)
    for name, part in reference.part_losses(predicted, noise, mask, parts).items():
        parity.compare("vitra", PEER, f"{quantity}, {name}", losses.parts[name], part)
    theirs = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert ours.keys() == theirs.keys()
    joined = [torch.cat([values[name].flatten() for name in theirs]) for values in (ours, theirs)]
    parity.compare("vitra", PEER, f"gradients of the {quantity}", *joined)


def test_sums_of_a_batch_pooled_over_samples_are_vitra_s_losses_of_the_parts(parity):
    policy, batch = vitra(size=4, state_drop=0.0)
    batch["action_dim_mask"][0, 51:], batch["action_dim_mask"][1, :51] = False, False
    losses = policy(batch, per_sample=True)
    for name, part in reference.part_losses(*reference_step(policy, batch), reference.HUMAN).items():
        total, count = losses.per_sample[name]
        parity.compare("vitra", PEER, f"loss of a batch, {name}", total.sum() / count.sum(), part)


@torch.no_grad()
@pytest.mark.parametrize(("size", "batches", "mean", "largest"), [(8, 16, 0.017, 0.047), (32, 12, 0.008, 0.015)])
def test_weighting_parts_by_sample_and_not_by_batch_changes_the_loss_as_documented(size, batches, mean, largest):
    """Batches have left hands, right hands and both, and chunks cut at the end of an episode."""
    policy, _ = vitra(state_drop=0.0)
    differences = []
    for seed in range(batches):
        batch = make_batch(policy.batch_spec(), size, seed=seed)
        hands = torch.randint(0, 3, (size, 1), generator=torch.Generator().manual_seed(seed))
        dims = torch.arange(192)
        batch["action_dim_mask"] = (dims < HAND_DIMS) & ((hands == 2) | (dims // 51 == hands))
        expected = reference.loss(*reference_step(policy, batch), reference.HUMAN)
        differences.append((policy(batch).total / expected - 1).abs().item())
    assert sum(differences) / batches == pytest.approx(mean, abs=0.001)
    assert max(differences) == pytest.approx(largest, abs=0.001)


@torch.no_grad()
def test_sampled_actions_are_those_of_vitra_s_guided_ddim(parity):
    policy, batch = vitra(size=2)
    policy.eval()
    batch["action_is_pad"][:] = False
    condition = policy.condition(batch, frozenset())
    unconditional = policy.dit.no_condition.expand_as(condition)

    def epsilon(x, timestep):
        timesteps = torch.full((2,), timestep)
        both = [predict(policy, batch, x, timesteps, condition) for condition in (condition, unconditional)]
        return reference.guide(*both, 5.0)

    expected = reference.ddim(epsilon, batch["noise"][:, 0], 100, 10)
    ours = policy.select_actions(batch)
    parity.compare("vitra", PEER, "sampled actions", ours[..., :HAND_DIMS], expected[..., :HAND_DIMS])
    assert not ours[..., HAND_DIMS:].any()


@torch.no_grad()
def test_the_condition_is_the_last_state_of_gemma_2_over_vitra_s_prefix(parity):
    policy, batch = vitra(size=2)
    batch["prompt_mask"][:] = True
    sizes = policy.config.model.backbone
    oracle = transformers.Gemma2Model(
        transformers.Gemma2Config(
            vocab_size=policy.config.model.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=sizes.mlp,
            num_hidden_layers=sizes.depth,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            query_pre_attn_scalar=sizes.head_dim,
            attn_logit_softcapping=sizes.softcap,
            sliding_window=4096,  # longer than the prefix, as at full size
            attn_implementation="eager",
        )
    ).eval()
    policy.model.windows = [None] * sizes.depth
    oracle.load_state_dict(gemma_weights(policy.model))
    images = policy.model.images("images", batch["images"], batch["image_mask"]).hidden
    words = torch.nn.functional.embedding(batch["prompt_tokens"], policy.model.vocabulary.weight)
    view = policy.field_of_view(batch["field_of_view"])
    embeddings = reference.prefix(images, words, view, policy.cognition.weight[0])
    visible = torch.zeros(2, 1, *[embeddings.shape[1]] * 2)  # an additive mask: all tokens attend to one another
    expected = oracle(inputs_embeds=embeddings, attention_mask=visible).last_hidden_state[:, -1]
    peer = f"transformers {transformers.__version__}"
    parity.compare("vitra", peer, "condition of the diffusion", policy.condition(batch, frozenset()), expected)


def gemma_weights(model):
    """Return the weights of a backbone under the names of transformers."""
    names = {
        "attention_norm": "input_layernorm",
        "output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    weights = {"embed_tokens.weight": model.vocabulary.weight, "norm.weight": model.norm.weight}
    for index, layer in enumerate(model.layers):
        parameters = dict(layer.backbone.named_parameters())
        weights |= {f"layers.{index}.{theirs}.weight": parameters[f"{name}.weight"] for name, theirs in names.items()}
    return weights
