"""The diffusion transformer by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchbox_policies.vitra.dit import Dit, DitConfig, DitLayer, embed_timestep

from benchbox.registry.contracts import Axes

CONFIG = DitConfig(width=24, depth=2, heads=3, mlp=48)
SAMPLES, DRAWS, HORIZON, ACTION, STATE, CONDITION = 2, 3, 5, 4, 6, 8


def build(*, awake: bool = True) -> Dit:
    """With every parameter away from where it starts, unless not `awake`."""
    torch.manual_seed(0)
    dit = Dit(CONFIG, Axes(), condition_width=CONDITION, state_dim=STATE, action_dim=ACTION, horizon=HORIZON)
    with torch.no_grad():
        for parameter in dit.parameters() if awake else ():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return dit


def told(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a call is told: everything real and known, no condition dropped."""
    torch.manual_seed(1)
    values = {
        "noisy": torch.randn(SAMPLES, DRAWS, HORIZON, ACTION),
        "real": torch.ones(SAMPLES, HORIZON, ACTION, dtype=torch.bool),
        "step": torch.tensor([[3, 40, 99], [0, 8, 60]]),
        "condition": torch.randn(SAMPLES, CONDITION),
        "dropped": torch.zeros(SAMPLES, DRAWS, dtype=torch.bool),
        "state": torch.randn(SAMPLES, STATE),
        "known": torch.ones(SAMPLES, STATE, dtype=torch.bool),
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


def test_a_new_one_answers_zero_and_its_layers_change_nothing():
    dit, args = build(awake=False), told()
    seen = []
    for layer in dit.layers:
        layer.register_forward_hook(lambda _, given, answer: seen.append(torch.equal(given[0], answer)))
    assert not dit(**args).any()
    assert seen == [True] * CONFIG.depth


@torch.no_grad()
@pytest.mark.parametrize("place", range(HORIZON))
def test_no_action_sees_a_later_one(place):
    dit, args = build(), told()
    before, after = dit(**args), dit(**args | {"noisy": changed(args["noisy"], ..., slice(place, None), slice(None))})
    assert torch.equal(after[:, :, :place], before[:, :, :place])
    assert (after != before)[:, :, place:].any(dim=-1).all()


@torch.no_grad()
def test_condition_state_and_actions_stand_in_that_order_and_none_sees_a_later_one():
    dit, args = build(), told()
    seen: list[torch.Tensor] = []
    dit.layers[-1].register_forward_hook(lambda _, __, answer: seen.append(answer))
    for change in (
        {},
        {"state": changed(args["state"])},
        {"noisy": changed(args["noisy"])},
        {"condition": changed(args["condition"])},
    ):
        dit(**args | change)
    before, other_state, other_actions, other_condition = seen
    assert before.shape == (SAMPLES * DRAWS, 2 + HORIZON, CONFIG.width)
    for after, first in ((other_state, 1), (other_actions, 2), (other_condition, 0)):
        assert torch.equal(after[:, :first], before[:, :first])
        assert (after != before)[:, first:].any(dim=-1).all()


@torch.no_grad()
def test_what_is_not_real_or_not_known_is_not_looked_at_but_that_it_is_missing_is():
    dit, args = build(), told()
    gaps = args | {"real": args["real"].clone(), "known": args["known"].clone()}
    gaps["real"][:, :, 2], gaps["known"][:, 1] = False, False
    other = gaps | {"noisy": changed(args["noisy"], ..., 2), "state": changed(args["state"], ..., 1)}
    assert torch.equal(dit(**gaps), dit(**other))
    zeroed = {name: args[name].clone() for name in ("noisy", "state")}
    zeroed["noisy"][..., 2], zeroed["state"][:, 1] = 0.0, 0.0
    assert not torch.equal(dit(**gaps), dit(**args | zeroed))


@torch.no_grad()
def test_a_chunk_whose_condition_is_dropped_is_told_the_learned_one_instead():
    dit, args = build(), told()
    args["dropped"][:, 1] = True
    before, after = dit(**args), dit(**args | {"condition": changed(args["condition"])})
    assert torch.equal(after[:, 1], before[:, 1])
    assert not torch.equal(after[:, 0], before[:, 0])
    instead = dit(**told(condition=dit.no_condition.expand(SAMPLES, -1)))
    torch.testing.assert_close(before[:, 1], instead[:, 1])


@torch.no_grad()
def test_chunks_of_a_sample_know_nothing_of_one_another():
    dit, args = build(), told()
    together = dit(**args)
    for draw in range(DRAWS):
        one = {name: args[name][:, draw : draw + 1] for name in ("noisy", "step", "dropped")}
        torch.testing.assert_close(dit(**args | one)[:, 0], together[:, draw])


@torch.no_grad()
def test_a_layer_is_what_the_paper_says():
    """Both branches modulated, gated and added: written out, one head and one token at a time."""
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
    for first in range(0, width, head):
        mine = slice(first, first + head)
        for token in range(length):
            asks = normed(query[token, mine], layer.query_norm.weight)
            scores = [asks @ normed(key[other, mine], layer.key_norm.weight) / math.sqrt(head) for other in range(token + 1)]
            attended[token, mine] = torch.stack(scores).softmax(0) @ value[: token + 1, mine]
    hidden = x[0] + gate * layer.output(attended)
    normed_hidden, gate = modulated(layer.mlp_norm, hidden)
    expected = hidden + gate * layer.down(F.gelu(layer.up(normed_hidden), approximate="tanh"))

    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    torch.testing.assert_close(layer(x, condition, causal)[0], expected, rtol=1e-5, atol=1e-5)


def test_the_step_is_told_in_cosines_and_sines_of_falling_frequency():
    embedded = embed_timestep(torch.tensor([0, 7]))
    assert embedded.dtype == torch.float32
    assert embedded[0].tolist() == [1.0] * 128 + [0.0] * 128
    angles = [7 * 10_000 ** (-place / 128) for place in range(128)]
    expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
    assert embedded[1].tolist() == pytest.approx(expected, abs=1e-6)
