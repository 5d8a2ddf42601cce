"""Text and generated tokens, compared with `transformers` at a tiny random configuration."""

from __future__ import annotations

import pytest
import torch
import transformers
from benchbox_policies._layers.nn.decoder import DecoderConfig, DecoderLayer
from benchbox_policies._layers.sequence.token_sequence import Block, TokenSequence, concat_blocks
from benchbox_policies._layers.weights.published import load_published
from benchbox_policies.cosmos_droid.mixture import GridLayer, Mixture
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from benchbox.registry.contracts import Axes
from tests.support.rotary_configs import rope_arguments

CONFIG = DecoderConfig(
    width=64,
    depth=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=96,
    activation="silu",
    unit_norm=False,
    qk_norm=True,
    rope_base=5e6,
)
VOCABULARY = 50


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    return torch.randint(0, VOCABULARY, (2, 9)), mask


def generated(length: int = 5) -> tuple[TokenSequence, torch.Tensor]:
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[0, 2] = False
    block = Block(name="generated", hidden=torch.randn(2, length, 64), valid=valid, attention="bidirectional")
    return concat_blocks([block]), torch.randint(0, 100, (2, length, 3))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_the_text_cache_is_that_of_qwen3(attention, tmp_path):
    """Keys and values of every layer are all that generated tokens get from the text."""
    torch.manual_seed(3)
    oracle = transformers.Qwen3Model(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=96,
            **rope_arguments({"rope_type": "default", "rope_theta": 5e6}),
        )
    ).eval()
    for parameter in oracle.parameters():  # norms too: ones would hide a missing one
        parameter.add_(0.1 * torch.randn_like(parameter))
    oracle.save_pretrained(tmp_path)
    model = Mixture(CONFIG, VOCABULARY, Axes(attention=attention), stretch=1)
    loaded = load_published(nn.ModuleDict({"model": model}), tmp_path)
    assert loaded.unexpected == ("norm.weight",), "the norm before the text head, which cosmos_droid does not have"
    assert all("expert" in name for name in loaded.missing)
    tokens, mask = prompt()
    expected = oracle(input_ids=tokens, attention_mask=mask, use_cache=True).past_key_values.layers
    cache = model.prefill(concat_blocks([model.text("prompt", tokens, mask, "causal")]))
    assert len(cache) == len(expected) == 3
    for (key, value), layer in zip(cache, expected, strict=True):
        for actual, oracle_tensor in ((key, layer.keys), (value, layer.values)):
            valid = mask[:, None, :, None].expand_as(actual)
            torch.testing.assert_close(actual[valid], oracle_tensor[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "sections"), [(128, [24, 20, 20]), (64, [12, 10, 10])])
def test_three_axes_are_rotated_as_in_qwen3_vl(head_dim, sections):
    config = DecoderConfig(width=8, depth=1, heads=1, kv_heads=1, head_dim=head_dim, mlp=8, rope_base=5e6)
    positions = torch.randint(0, 50, (2, 7, 3))
    oracle = Qwen3VLTextRotaryEmbedding(
        transformers.Qwen3VLTextConfig(
            head_dim=head_dim, **rope_arguments({"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections})
        )
    )
    expected = oracle(torch.zeros(()), positions.permute(2, 0, 1))
    for actual, oracle_tensor in zip(GridLayer(config, 0, stretch=60)._cos_sin(60 * positions), expected, strict=True):
        torch.testing.assert_close(actual[:, 0], oracle_tensor[..., : head_dim // 2], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_equal_positions_on_all_axes_rotate_as_in_the_layer_of_the_text():
    """A grid layer of stretch 60 gets 60 times the positions of a text layer."""
    line, grid = DecoderLayer(CONFIG, 0), GridLayer(CONFIG, 0, stretch=60)
    grid.load_state_dict(line.state_dict())
    x, positions = torch.randn(2, 7, 64), torch.arange(7).expand(2, -1)
    actual = grid.project_qkv(x, 60 * positions[..., None].expand(-1, -1, 3), None)
    expected = line.project_qkv(x, positions, None)
    for actual_tensor, expected_tensor in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_text_is_causal_and_does_not_attend_to_generated_tokens():
    """The text can be cached: generated tokens are the same with the cache as with the text."""
    torch.manual_seed(0)
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    tokens, mask = prompt()
    text = concat_blocks([model.text("prompt", tokens, mask, "causal")])
    sequence, positions = generated()
    values = []
    for layer in model.layers:
        layer.backbone.value.register_forward_hook(lambda _, __, output: values.append(output))
    together = model(text, sequence, positions)
    first_values, values = values, []
    cached = model(text, sequence, positions, model.prefill(text))
    assert len(values) == len(model.layers), "only prefill computes values of the text"
    torch.testing.assert_close(cached, together, rtol=1e-5, atol=1e-6)
    model(text, *generated())
    assert all(torch.equal(*pair) for pair in zip(first_values, values[3:], strict=True))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
    before, after = (
        model.prefill(concat_blocks([model.text("prompt", text_tokens, mask, "causal")])) for text_tokens in (tokens, changed)
    )
    for (key, value), (changed_key, changed_value) in zip(before, after, strict=True):
        assert torch.equal(key[:, :, :5], changed_key[:, :, :5])
        assert torch.equal(value[:, :, :5], changed_value[:, :, :5])
        assert not torch.equal(value[0, :, 5:], changed_value[0, :, 5:])


def test_generated_tokens_attend_to_one_another_and_the_text_but_not_to_padding():
    torch.manual_seed(0)
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    tokens, mask = prompt()
    text, (sequence, positions) = concat_blocks([model.text("prompt", tokens, mask, "causal")]), generated()
    for hidden in (text.hidden, sequence.hidden):
        hidden.requires_grad_()
    model(text, sequence, positions)[:, 0].square().sum().backward()
    for hidden, valid in ((text.hidden, mask), (sequence.hidden, sequence.valid)):
        assert torch.equal(hidden.grad.abs().sum(dim=-1) > 0, valid)


def test_only_layers_of_generated_tokens_train():
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".expert." in name or name == "expert_norm.weight"}
