"""An independent implementation, `transformers`, at a tiny random configuration, with its weights loaded into ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from benchbox_policies._layers.decoder import DecoderConfig
from benchbox_policies._layers.published import paligemma_name
from benchbox_policies._layers.siglip import SiglipConfig
from benchbox_policies._layers.stream import lay
from benchbox_policies._layers.units import LayerPair
from benchbox_policies._layers.vision_language import VisionLanguage, VisionLanguageConfig
from safetensors.torch import load_file

from benchbox.registry.contracts import Axes

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = VisionLanguageConfig(
    vision=SiglipConfig(width=48, depth=2, heads=3, mlp=80, image=32, patch=8),
    backbone=DecoderConfig(width=64, depth=3, heads=4, kv_heads=1, head_dim=24, mlp=96),
    vocabulary=300,
)
IMAGE_TOKEN = 299


@pytest.fixture(scope="module")
def oracle():
    vision, backbone = CONFIG.vision, CONFIG.backbone
    config = transformers.PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.heads,
            "image_size": vision.image,
            "patch_size": vision.patch,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "gemma",
            "vocab_size": CONFIG.vocabulary,
            "hidden_size": backbone.width,
            "intermediate_size": backbone.mlp,
            "num_hidden_layers": backbone.depth,
            "num_attention_heads": backbone.heads,
            "num_key_value_heads": backbone.kv_heads,
            "head_dim": backbone.head_dim,
        },
        projection_dim=backbone.width,
        image_token_index=IMAGE_TOKEN,
    )
    torch.manual_seed(3)
    model = transformers.PaliGemmaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: zeros would hide a missing one
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def published(oracle, tmp_path_factory):
    """The tensors as `transformers` publishes them."""
    folder: Path = tmp_path_factory.mktemp("paligemma")
    oracle.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def ours(published, attention) -> VisionLanguage:
    model = VisionLanguage(CONFIG, Axes(attention=attention)).eval()
    model.load_state_dict({paligemma_name(name): value for name, value in published.items()})
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_siglip_is_that_of_transformers(oracle, published, attention):
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    expected = oracle.model.vision_tower(pixels.float() / 127.5 - 1.0).last_hidden_state
    torch.testing.assert_close(ours(published, attention).vision(pixels[:, None]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_gemma_is_that_of_transformers_on_causal_text(oracle, published, attention):
    model = ours(published, attention)
    tokens, mask = torch.randint(0, IMAGE_TOKEN, (2, 9)), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    expected = oracle.model.language_model(input_ids=tokens, attention_mask=mask).last_hidden_state
    found = backbone(model, [model.text("text", tokens, mask, "causal")])
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_images_and_bidirectional_text_together_give_the_logits_of_transformers(oracle, published):
    model = ours(published, "sdpa")
    pixels = torch.randint(0, 256, (2, 1, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.randint(0, IMAGE_TOKEN, (2, 5))
    patches = CONFIG.vision.tokens
    ids = torch.cat((torch.full((2, patches), IMAGE_TOKEN), tokens), dim=1)
    everywhere = torch.zeros(2, 1, patches + 5, patches + 5)  # an additive mask: nothing is hidden
    expected = oracle(input_ids=ids, pixel_values=pixels[:, 0].float() / 127.5 - 1.0, attention_mask=everywhere).logits
    blocks = [
        model.images("images", pixels[:, None], torch.ones(2, 1, 1, dtype=torch.bool)),
        model.text("text", tokens, torch.ones(2, 5, dtype=torch.bool), "continue"),
    ]
    found = model.vocabulary(backbone(model, blocks), scores=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def backbone(model: VisionLanguage, blocks) -> torch.Tensor:
    """The normed stream."""
    return model.norm(model(lay(blocks)))


@torch.no_grad()
def test_a_plain_expert_is_gemma_too_reading_the_prefix_through_its_keys_and_values():
    """Expert and backbone with the same weights, in one group, are one Gemma over prefix and suffix."""
    config = CONFIG.backbone
    pair = LayerPair(config, config, 0, Axes(), insulated=False, adaptive=False, unheard=False)
    pair.expert.load_state_dict(pair.backbone.state_dict())
    hidden = torch.randn(2, 7, config.width)
    see, positions = torch.ones(2, 7, 7, dtype=torch.bool), torch.arange(7).expand(2, -1)
    see[:, :4, 4:] = False
    whole, _ = pair((hidden, see, positions))
    prefix, suffix = pair(
        (hidden[:, :4], see[:, :4, :4], positions[:, :4]), (hidden[:, 4:], see[:, 4:], positions[:, 4:], None)
    )
    torch.testing.assert_close(torch.cat((prefix, suffix), dim=1), whole, rtol=1e-5, atol=1e-5)
