"""The two streams, against `transformers` at a tiny random configuration."""

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
def test_what_is_read_of_a_text_is_what_qwen3_keeps_of_it(attention, tmp_path):
    """Keys and values of every layer: all that the other stream learns of the text."""
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
            rope_parameters={"rope_type": "default", "rope_theta": 5e6},
        )
    ).eval()
    for parameter in oracle.parameters():  # norms too: ones would hide a missing one
        parameter.add_(0.1 * torch.randn_like(parameter))
    oracle.save_pretrained(tmp_path)
    model = Mixture(CONFIG, VOCABULARY, Axes(attention=attention), stretch=1)
    loaded = load_published(nn.ModuleDict({"model": model}), tmp_path)
    assert loaded.unexpected == ("norm.weight",), "of what would say the next word"
    assert all("expert" in name for name in loaded.missing)
    tokens, mask = prompt()
    expected = oracle(input_ids=tokens, attention_mask=mask, use_cache=True).past_key_values.layers
    cache = model.read(concat_blocks([model.text("prompt", tokens, mask, "causal")]))
    assert len(cache) == len(expected) == 3
    for (key, value), layer in zip(cache, expected, strict=True):
        for found, wanted in ((key, layer.keys), (value, layer.values)):
            real = mask[:, None, :, None].expand_as(found)
            torch.testing.assert_close(found[real], wanted[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "sections"), [(128, [24, 20, 20]), (64, [12, 10, 10])])
def test_three_axes_are_rotated_as_in_qwen3_vl(head_dim, sections):
    config = DecoderConfig(width=8, depth=1, heads=1, kv_heads=1, head_dim=head_dim, mlp=8, rope_base=5e6)
    places = torch.randint(0, 50, (2, 7, 3))
    oracle = Qwen3VLTextRotaryEmbedding(
        transformers.Qwen3VLTextConfig(
            head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
        )
    )
    expected = oracle(torch.zeros(()), places.permute(2, 0, 1))
    for found, wanted in zip(GridLayer(config, 0, stretch=60)._cos_sin(60 * places), expected, strict=True):
        torch.testing.assert_close(found[:, 0], wanted[..., : head_dim // 2], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_lies_on_a_line_through_the_grid_is_a_text():
    """The same place on all axes, in the parts of a position that a grid has: the layer of the text."""
    line, grid = DecoderLayer(CONFIG, 0), GridLayer(CONFIG, 0, stretch=60)
    grid.load_state_dict(line.state_dict())
    x, positions = torch.randn(2, 7, 64), torch.arange(7).expand(2, -1)
    found, expected = grid.before(x, 60 * positions[..., None].expand(-1, -1, 3), None), line.before(x, positions, None)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_text_is_causal_and_does_not_see_what_is_generated():
    """So it is read once: beside what was read, what is generated comes out the same as beside the text."""
    torch.manual_seed(0)
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    tokens, mask = prompt()
    text = concat_blocks([model.text("prompt", tokens, mask, "causal")])
    stream, places = generated()
    seen = []
    for layer in model.layers:
        layer.backbone.value.register_forward_hook(lambda _, __, output: seen.append(output))
    together = model(text, stream, places)
    beside, seen = seen, []
    cached = model(text, stream, places, model.read(text))
    assert len(seen) == len(model.layers), "reading, and only reading, computes values of the text"
    torch.testing.assert_close(cached, together, rtol=1e-5, atol=1e-6)
    model(text, *generated())
    assert all(torch.equal(*pair) for pair in zip(beside, seen[3:], strict=True))
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % VOCABULARY
    before, after = (model.read(concat_blocks([model.text("prompt", some, mask, "causal")])) for some in (tokens, later))
    for (key, value), (other_key, other_value) in zip(before, after, strict=True):
        assert torch.equal(key[:, :, :5], other_key[:, :, :5])
        assert torch.equal(value[:, :, :5], other_value[:, :, :5])
        assert not torch.equal(value[0, :, 5:], other_value[0, :, 5:])


def test_what_is_generated_sees_all_of_itself_and_the_text_but_no_padding():
    torch.manual_seed(0)
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    tokens, mask = prompt()
    block = model.text("prompt", tokens, mask, "causal")
    text, (stream, places) = concat_blocks([block]), generated()
    for hidden in (block.hidden, stream.hidden):
        hidden.retain_grad() if hidden.requires_grad else hidden.requires_grad_()
    model(text, stream, places)[:, 0].square().sum().backward()
    for hidden, valid in ((block.hidden, mask), (stream.hidden, stream.valid)):
        assert torch.equal(hidden.grad.abs().sum(dim=-1) > 0, valid)


def test_the_last_layer_trains_of_the_text_only_what_is_read():
    model = Mixture(CONFIG, VOCABULARY, Axes(), stretch=60)
    frozen = {name.removeprefix("layers.2.backbone.") for name, some in model.named_parameters() if not some.requires_grad}
    assert frozen == {
        f"{name}.weight" for name in ("query", "query_norm", "output", "mlp_norm", "mlp.gate", "mlp.up", "mlp.down")
    }
