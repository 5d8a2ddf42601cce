"""The diffusion transformer without the rest of VITRA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchbox_policies.vitra.dit import Dit, DitConfig, DitLayer

from benchbox.registry.contracts import Axes

CONFIG = DitConfig(width=24, depth=2, heads=3, mlp=48)
SAMPLES, DRAWS, HORIZON, ACTION, STATE, CONDITION = 2, 3, 5, 4, 6, 8


def build(*, awake: bool = True) -> Dit:
    """Return a transformer with all parameters changed from their initial values if `awake`."""
    torch.manual_seed(0)
    dit = Dit(CONFIG, Axes(), condition_width=CONDITION, state_dim=STATE, action_dim=ACTION, horizon=HORIZON)
    with torch.no_grad():
        for parameter in dit.parameters() if awake else ():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return dit


def inputs(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return arguments of a call: all dimensions valid, no condition dropped."""
    torch.manual_seed(1)
    values = {
        "x_t": torch.randn(SAMPLES, DRAWS, HORIZON, ACTION),
        "action_mask": torch.ones(SAMPLES, HORIZON, ACTION, dtype=torch.bool),
        "timestep": torch.tensor([[3, 40, 99], [0, 8, 60]]),
        "condition": torch.randn(SAMPLES, CONDITION),
        "unconditional": torch.zeros(SAMPLES, DRAWS, dtype=torch.bool),
        "state": torch.randn(SAMPLES, STATE),
        "state_mask": torch.ones(SAMPLES, STATE, dtype=torch.bool),
    }
    return values | changes


def changed(values: torch.Tensor, *where: Any) -> torch.Tensor:
    values = values.clone()
    values[where] += 1.0
    return values


def test_dit_b_over_vitras_dimensions_has_the_published_number_of_parameters():
    """136.6 M."""
    with torch.device("meta"):
        config = DitConfig(width=768, depth=12, heads=12, mlp=3072)
        dit = Dit(config, Axes(), condition_width=2304, state_dim=212, action_dim=192, horizon=16)
    assert sum(parameter.numel() for parameter in dit.parameters()) == 136_587_456


def test_a_new_transformer_predicts_zero_and_its_layers_are_the_identity():
    dit, args = build(awake=False), inputs()
    unchanged = []
    for layer in dit.layers:
        layer.register_forward_hook(lambda _, args, output: unchanged.append(torch.equal(args[0], output)))
    assert not dit(**args).any()
    assert unchanged == [True] * CONFIG.depth


@torch.no_grad()
@pytest.mark.parametrize("step", range(HORIZON))
def test_actions_do_not_attend_to_later_ones(step):
    dit, args = build(), inputs()
    before, after = dit(**args), dit(**args | {"x_t": changed(args["x_t"], ..., slice(step, None), slice(None))})
    assert torch.equal(after[:, :, :step], before[:, :, :step])
    assert (after != before)[:, :, step:].any(dim=-1).all()


@torch.no_grad()
def test_tokens_are_condition_state_and_actions_with_causal_attention():
    dit, args = build(), inputs()
    outputs: list[torch.Tensor] = []
    dit.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
    for change in (
        {},
        {"state": changed(args["state"])},
        {"x_t": changed(args["x_t"])},
        {"condition": changed(args["condition"])},
    ):
        dit(**args | change)
    before, after_state, after_actions, after_condition = outputs
    assert before.shape == (SAMPLES * DRAWS, 2 + HORIZON, CONFIG.width)
    for after, token in ((after_state, 1), (after_actions, 2), (after_condition, 0)):
        assert torch.equal(after[:, :token], before[:, :token])
        assert (after != before)[:, token:].any(dim=-1).all()


@torch.no_grad()
def test_masked_values_are_ignored_but_the_mask_is_not():
    dit, args = build(), inputs()
    masked = args | {"action_mask": args["action_mask"].clone(), "state_mask": args["state_mask"].clone()}
    masked["action_mask"][:, :, 2], masked["state_mask"][:, 1] = False, False
    changed_masked = masked | {"x_t": changed(args["x_t"], ..., 2), "state": changed(args["state"], ..., 1)}
    assert torch.equal(dit(**masked), dit(**changed_masked))
    zeroed = {name: args[name].clone() for name in ("x_t", "state")}
    zeroed["x_t"][..., 2], zeroed["state"][:, 1] = 0.0, 0.0
    assert not torch.equal(dit(**masked), dit(**args | zeroed))


@torch.no_grad()
def test_a_chunk_with_a_dropped_condition_gets_the_learned_one():
    dit, args = build(), inputs()
    args["unconditional"][:, 1] = True
    before, after = dit(**args), dit(**args | {"condition": changed(args["condition"])})
    assert torch.equal(after[:, 1], before[:, 1])
    assert not torch.equal(after[:, 0], before[:, 0])
    learned = dit(**inputs(condition=dit.no_condition.expand(SAMPLES, -1)))
    torch.testing.assert_close(before[:, 1], learned[:, 1])


@torch.no_grad()
def test_chunks_of_a_sample_are_independent():
    dit, args = build(), inputs()
    together = dit(**args)
    for draw in range(DRAWS):
        one = {name: args[name][:, draw : draw + 1] for name in ("x_t", "timestep", "unconditional")}
        torch.testing.assert_close(dit(**args | one)[:, 0], together[:, draw])


@torch.no_grad()
def test_a_layer_computes_the_paper_s_formula():
    """Both branches are modulated, gated and added; written out for each head and token."""
    layer = DitLayer(CONFIG, Axes(attention="eager"))
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    length, width, head = 4, CONFIG.width, CONFIG.width // CONFIG.heads
    x, condition = torch.randn(1, length, width), torch.randn(1, width)

    def modulated(norm: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift, scale, gate = norm.modulation(condition)[0].chunk(3)
        return (hidden - hidden.mean(-1, keepdim=True)) / (hidden.var(-1, correction=0, keepdim=True) + 1e-6).sqrt() * (
            1 + scale
        ) + shift, gate

    def normed(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vector / (vector.square().mean() + 1e-6).sqrt() * weight

    normed_x, gate = modulated(layer.attention_norm, x[0])
    query, key, value = layer.query_key_value(normed_x).chunk(3, dim=-1)
    attended = torch.zeros(length, width)
    for start in range(0, width, head):
        head_slice = slice(start, start + head)
        for token in range(length):
            normed_query = normed(query[token, head_slice], layer.query_norm.weight)
            keys = [normed(key[index, head_slice], layer.key_norm.weight) for index in range(token + 1)]
            scores = [normed_query @ normed_key / math.sqrt(head) for normed_key in keys]
            attended[token, head_slice] = torch.stack(scores).softmax(0) @ value[: token + 1, head_slice]
    hidden = x[0] + gate * layer.output(attended)
    normed_hidden, gate = modulated(layer.mlp_norm, hidden)
    expected = hidden + gate * layer.down(F.gelu(layer.up(normed_hidden), approximate="tanh"))

    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x, condition, causal)[0], expected, rtol=1e-5, atol=1e-5)
