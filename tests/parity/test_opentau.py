"""The pi policies and the value function against the formulas of OpenTau, with the same weights, batch, noise and time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers

from tests.parity.opentau import (
    EXPERT_NAMES,
    PEER,
    Sequence,
    acting,
    layers_of,
    sequence_of,
    text,
)
from tests.reference import opentau_losses as losses
from tests.support.policy_batches import build


@acting
def test_velocity_losses_and_gradients_are_those_of_opentau(name, parity):
    sequence = sequence_of(name)
    policy, batch = sequence.policy, sequence.batch
    velocities = []
    policy.action_out.register_forward_hook(lambda *arguments: velocities.append(arguments[2].detach()))
    result = policy(batch, per_sample=True)
    result.total.backward()

    velocity, target = sequence.flow()
    parity.compare(name, PEER, "velocity", velocities[0], velocity)
    errors = losses.flow_errors(velocity, target, batch["action_is_pad"], batch["action_dim_mask"])
    total, count = result.per_sample["flow"]
    parity.compare(name, PEER, "flow error per sample", total, errors.sum(dim=(1, 2)))
    expert = [key for key, parameter in policy.named_parameters() if "expert" in key or key.startswith(("action_", "time."))]
    reference = torch.autograd.grad((errors.sum(dim=(1, 2)) / count).mean(), [policy.get_parameter(key) for key in expert])
    ours = torch.cat([policy.get_parameter(key).grad.flatten() for key in expert])
    parity.compare(name, PEER, "gradient of expert", ours, torch.cat([grad.flatten() for grad in reference]), bound=1e-4)

    index = len(sequence.parts) - 1
    if name == "pi05_mem":  # predicted by its states: the response, which OpenTau lacks, has padding
        sequence.parts.pop(-2)
        policy, batch = sequence.policy, {**batch, "response_mask": torch.zeros_like(batch["response_mask"])}
        result, index = policy(batch, per_sample=True), index - 1
    fast_errors = losses.token_errors(sequence.logits_before(index, "discrete.head"), batch["fast_tokens"], batch["fast_mask"])
    parity.compare(name, PEER, "FAST cross-entropy per sample", result.per_sample["fast"][0], fast_errors.sum(dim=1))
    assert set(result.parts) == {"flow", "fast", "fast_truncated"} | (
        {"response"} if name in ("pi05", "pi06", "pi05_mem") else set()
    )


@acting
@torch.no_grad()
def test_sampled_actions_are_those_of_opentau(name, parity):
    sequence = sequence_of(name)
    policy, batch = sequence.policy, sequence.batch
    steps = 5 if name in ("pi06", "pi07_low_level") else 10
    action = losses.sample(sequence.velocity, batch["noise"][:, 0], steps)
    action = policy.action_normaliser.denormalise(action, batch["dataset_index"])
    batch["action_dim_mask"] = torch.ones_like(batch["action_dim_mask"])
    parity.compare(name, PEER, "sampled actions", policy.select_actions(batch), action)


@torch.no_grad()
def test_the_value_function_has_the_losses_of_opentau(parity):
    sequence = sequence_of("value")
    policy, batch = sequence.policy, {**sequence.batch, "returns": -torch.tensor([0.0, 50.0, 203.0, 400.0]) / 400}
    result = policy(batch, per_sample=True)
    bins = torch.tensor([losses.return_bin(steps, 400, policy.config.bins) for steps in (0, 50, 203, 400)])
    states, _ = sequence.run(sequence.parts[:3])  # as OpenTau predicts a value, without a response
    logits = sequence.layers.linear(states[:, -1], "head")
    errors = F.cross_entropy(logits, bins, reduction="none")
    parity.compare("value", PEER, "cross-entropy of value", result.per_sample["value"][0], errors)
    distance = (losses.expected_value(logits) - batch["returns"]).abs().mean()
    parity.compare("value", PEER, "distance of value", result.parts["l1"], distance)
    assert result.parts["accuracy"] == (logits.argmax(dim=-1) == bins).float().mean()
    errors = losses.token_errors(sequence.logits_before(3, "response_head"), batch["response_tokens"], batch["response_mask"])
    parity.compare("value", PEER, "cross-entropy of response", result.per_sample["response"][0], errors.sum(dim=1))


def test_returns_are_in_the_bins_of_opentau():
    """All returns of an episode of 400 steps, and of one of 333, whose returns are not exact in binary."""
    policy = build("value")
    for longest in (400, 333):
        steps = torch.arange(longest + 1)
        expected = [losses.return_bin(int(number), longest, policy.config.bins) for number in steps]
        ours = policy.bin_indices((-steps.double() / longest).float()).tolist()
        exact = [(longest - int(number)) * (policy.config.bins - 1) // longest for number in steps]
        assert ours == exact
        others = [number for number, bin_index in enumerate(expected) if bin_index != exact[number]]
        assert len(others) < 0.02 * longest, "OpenTau's float64 rounds few returns down that are exactly on an edge"
        assert all((longest - number) * (policy.config.bins - 1) % longest == 0 for number in others)


def gemma(policy, kind: str, width: int, mlp: int):
    """Return a random text model of `transformers` with the sizes of a policy's layers, and without windows."""
    backbone = policy.config.model.backbone
    torch.manual_seed(1)
    far = {"rope_type": "linear", "factor": backbone.global_rope_stretch, "rope_theta": backbone.global_rope_base}
    near = {"rope_type": "default", "rope_theta": 1e4}
    kinds = ["full_attention" if (n + 1) % backbone.global_every == 0 else "sliding_attention" for n in range(backbone.depth)]
    later = {
        "query_pre_attn_scalar": backbone.head_dim,
        "sliding_window": 4096,
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": near, "full_attention": far},
    }
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=policy.config.model.vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=backbone.depth,
        num_attention_heads=backbone.heads,
        num_key_value_heads=backbone.kv_heads,
        head_dim=backbone.head_dim,
        **(later if kind == "gemma3_text" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def test_the_backbone_of_the_reference_is_gemma_3_of_transformers(tmp_path, parity):
    policy = build("pi06")
    backbone = policy.config.model.backbone
    oracle = gemma(policy, "gemma3_text", backbone.width, backbone.mlp)
    oracle.save_pretrained(tmp_path)
    assert policy.load_weights(tmp_path).unexpected == ()
    tokens = torch.randint(3, 300, (2, 40))
    part = text(policy, tokens, None, "causal")
    ours, _ = Sequence(policy, {}, []).run([part])
    parity.compare("pi06", "transformers", "backbone of the reference", ours, oracle.model(input_ids=tokens).last_hidden_state)


@torch.no_grad()
def test_the_expert_of_the_reference_is_gemma_of_transformers_where_its_norms_are_constant(parity):
    """Modulations with scale w, shift 0 and gate 1 are plain norms."""
    policy = build("pi05_mem")
    oracle = gemma(policy, "gemma", policy.config.model.expert.width, policy.config.model.expert.mlp)
    weights = {}
    for name, tensor in oracle.model.state_dict().items():
        key = "model.expert_norm.weight" if name == "norm.weight" else name.replace("layers.", "model.layers.")
        for theirs, ours in EXPERT_NAMES.items():
            key = key.replace(f".{theirs}.", f".expert.{ours}.")
        if "norm" in key:
            module = key.removesuffix("weight") + "modulation"
            weights[f"{module}.weight"] = torch.zeros(3 * len(tensor), len(tensor))
            weights[f"{module}.bias"] = torch.cat((tensor, torch.zeros_like(tensor), torch.ones_like(tensor)))
        else:
            weights[key] = tensor
    hidden = torch.randn(2, 9, policy.config.model.expert.width)
    backbone = policy.config.model.backbone
    empty = [(torch.zeros(2, 0, backbone.kv_heads, backbone.head_dim),) * 2] * backbone.depth
    positions, mask = torch.arange(9).expand(2, -1), torch.ones(2, 9, 9, dtype=torch.bool).tril()
    ours = layers_of(policy, weights=weights).suffix(hidden, torch.zeros(2, hidden.shape[-1]), mask, positions, empty)
    theirs = oracle.model(inputs_embeds=hidden).last_hidden_state
    parity.compare("pi05_mem", "transformers", "expert of the reference", ours, theirs)
