"""Later generations of the decoder, against `transformers` at tiny random configurations."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from benchbox_policies._layers.nn.decoder import DecoderConfig
from benchbox_policies._layers.nn.norms import RMSNorm
from benchbox_policies._layers.nn.units import BackboneLayer
from benchbox_policies._layers.sequence.attention_mask import AttentionMask
from torch import nn

from benchbox.registry.contracts import Axes
from tests.support.rotary_configs import rope_arguments

SIZES = {"width": 64, "depth": 6, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96}
HF_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 50,
    "query_pre_attn_scalar": 16,
    "attn_implementation": "eager",
}
NAMES = (
    (r"self_attn\.q_norm", "query_norm"),
    (r"self_attn\.k_norm", "key_norm"),
    (r"self_attn\.q_proj", "query"),
    (r"self_attn\.k_proj", "key"),
    (r"self_attn\.v_proj", "value"),
    (r"self_attn\.o_proj", "output"),
    (r"mlp\.(gate|up|down)_proj", r"mlp.\1"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "output_norm"),
    (r"pre_feedforward_layernorm", "mlp_norm"),
    (r"post_feedforward_layernorm", "down_norm"),
    (r"^layers\.(\d+)", r"layers.\1.backbone"),
)


def gemma2() -> tuple[nn.Module, DecoderConfig]:
    config = transformers.Gemma2Config(**HF_SIZES, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=None)
    decoder_config = DecoderConfig(**SIZES, sandwich=True, softcap=2.0, window=5, global_every=2)
    return transformers.Gemma2Model(config), decoder_config


def gemma3() -> tuple[nn.Module, DecoderConfig]:
    kinds = ["full_attention" if (layer + 1) % 3 == 0 else "sliding_attention" for layer in range(6)]
    config = transformers.Gemma3TextConfig(
        **HF_SIZES,
        sliding_window=5,
        layer_types=kinds,
        **rope_arguments(
            {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        ),
    )
    decoder_config = DecoderConfig(
        **SIZES, sandwich=True, qk_norm=True, window=5, global_every=3, global_rope_base=1e6, global_rope_stretch=8.0
    )
    return transformers.Gemma3TextModel(config), decoder_config


class Decoder(nn.Module):
    """Decoder layers and the final norm."""

    def __init__(self, config: DecoderConfig, attention: Any) -> None:
        super().__init__()
        self.attention, self.windows = attention, config.windows
        self.layers = nn.ModuleList(BackboneLayer(config, layer, Axes(attention=attention)) for layer in range(config.depth))
        self.norm = RMSNorm(config.width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        size, length, _ = hidden.shape
        order = torch.arange(length)
        positions, valid = order.expand(size, -1), torch.ones(size, length, dtype=torch.bool)
        attention_mask = AttentionMask(
            query_groups=order,
            key_groups=order,
            query_valid=valid,
            key_valid=valid,
            query_positions=positions,
            key_positions=positions,
        )
        for layer, window in zip(self.layers, self.windows, strict=True):
            hidden = layer(hidden, attention_mask.build(self.attention, window), positions)
        return self.norm(hidden)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("generation", [gemma2, gemma3])
@torch.no_grad()
def test_the_layers_are_those_of_transformers(generation, attention):
    """Soft caps, norms of queries and keys and after every branch, windows, and two rotary bases, over more than one window."""
    torch.manual_seed(3)
    oracle, config = generation()
    oracle = oracle.eval()
    for parameter in oracle.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {}
    for name, value in oracle.state_dict().items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        weights[name] = value
    del weights["embed_tokens.weight"]
    model = Decoder(config, attention).eval()
    model.load_state_dict({name: value for name, value in weights.items() if not name.startswith("rotary")})
    embedded = torch.randn(2, 13, 64)
    # transformers 4 scales the input of Gemma 2 in the model, transformers 5 in the embedding. The scale is a power of two.
    scale = 1.0 if hasattr(oracle.embed_tokens, "embed_scale") else config.width**0.5
    expected = oracle(inputs_embeds=embedded / scale).last_hidden_state
    torch.testing.assert_close(model(embedded), expected, rtol=1e-4, atol=1e-5)
