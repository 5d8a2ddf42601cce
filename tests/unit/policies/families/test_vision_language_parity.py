"""Parity with `transformers` at tiny random configurations, with its weights loaded as it saves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from benchbox_policies._layers.families.vision_language import VisionLanguage, VisionLanguageConfig
from benchbox_policies._layers.nn.decoder import DecoderConfig
from benchbox_policies._layers.nn.siglip import SiglipConfig
from benchbox_policies._layers.nn.units import LayerPair
from benchbox_policies._layers.sequence.token_sequence import concat_blocks
from benchbox_policies._layers.weights.published import load_published
from torch import nn

from benchbox.registry.contracts import Axes
from tests.support.policy_batches import build
from tests.support.rotary_configs import rope_arguments

VISION = SiglipConfig(width=48, depth=2, heads=3, mlp=80, image=32, patch=8)
BACKBONE = DecoderConfig(width=64, depth=3, heads=4, kv_heads=1, head_dim=24, mlp=96)
# Small caps and windows, so that ignoring them changes the results.
GEMMA_2 = replace(BACKBONE, kv_heads=2, sandwich=True, softcap=1.5, window=4, global_every=2)
GEMMA_3 = replace(
    BACKBONE,
    kv_heads=2,
    sandwich=True,
    qk_norm=True,
    window=6,
    global_every=3,
    global_rope_base=1e6,
    global_rope_stretch=8.0,
)
WORDS, IMAGE_TOKEN = 299, 299

TEXT = {"gemma": BACKBONE, "gemma 2": GEMMA_2, "gemma 3": GEMMA_3}


class PublishedModel(nn.Module):
    """A module with a `model`, as in all policies that load published weights."""

    def __init__(self, backbone: DecoderConfig, pool: int | None, attention: str) -> None:
        super().__init__()
        config = VisionLanguageConfig(vision=VISION, backbone=backbone, pool=pool, vocabulary=WORDS + 1)
        self.model = VisionLanguage(config, Axes(attention=attention))


def text_config(backbone, words=WORDS + 1):
    """Return the configuration of `transformers` for a backbone."""
    kind = "gemma3_text" if backbone.qk_norm else "gemma2" if backbone.softcap else "gemma"
    base = {"rope_type": "default", "rope_theta": backbone.rope_base}
    stretched = {"rope_type": "linear", "factor": backbone.global_rope_stretch, "rope_theta": backbone.global_rope_base}
    later = {
        "query_pre_attn_scalar": backbone.head_dim,
        "sliding_window": backbone.window,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in backbone.windows],
    }
    settings = {
        "gemma": {},
        # No cap of the final logits: no policy predicts text with Gemma 2.
        "gemma2": {**later, "attn_logit_softcapping": backbone.softcap, "final_logit_softcapping": None},
        "gemma3_text": later | rope_arguments({"sliding_attention": base, "full_attention": stretched}),
    }
    return {
        "model_type": kind,
        "vocab_size": words,
        "hidden_size": backbone.width,
        "intermediate_size": backbone.mlp,
        "num_hidden_layers": backbone.depth,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_heads,
        "head_dim": backbone.head_dim,
        **settings[kind],
    }


def vision_config(vision):
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": vision.width,
        "intermediate_size": vision.mlp,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.heads,
        "image_size": vision.image,
        "patch_size": vision.patch,
        "vision_use_head": False,
    }


def text_oracle(text):
    config = transformers.AutoConfig.for_model(**text, attn_implementation="eager")  # sdpa of transformers 4 ignores soft caps
    return transformers.AutoModelForCausalLM.from_config(config)


def paligemma_oracle(vision, text):
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=text,
        projection_dim=text["hidden_size"],
        image_token_index=IMAGE_TOKEN,
        attn_implementation="eager",
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma_3_oracle(vision, text, tokens):
    config = transformers.Gemma3Config(
        vision_config=vision, text_config=text, mm_tokens_per_image=tokens, image_token_index=IMAGE_TOKEN
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def randomised(oracle):
    """Change every parameter: zeros of norms and biases would hide a missing one."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return oracle.eval()


def load_model(oracle, folder, backbone=BACKBONE, pool=None, attention="sdpa", missing=()):
    """Return the policy's model with the oracle's weights, loaded from its files, and assert which parts they lack."""
    oracle.save_pretrained(folder)
    policy = PublishedModel(backbone, pool, attention).eval()
    loaded = load_published(policy, folder)
    assert loaded.unexpected == ()
    assert {name.split(".")[1] for name in loaded.missing} == set(missing)
    return policy.model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_siglip_is_that_of_transformers(tmp_path, attention):
    oracle = randomised(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**vision_config(VISION))))
    model = load_model(oracle, tmp_path, attention=attention, missing={"projector", "vocabulary", "layers", "norm"})
    pixels = images(3)
    expected = oracle(scaled(pixels)).last_hidden_state
    torch.testing.assert_close(model.vision(pixels[:, None]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", TEXT)
@torch.no_grad()
def test_causal_text_is_that_of_transformers(tmp_path, family, attention):
    oracle = randomised(text_oracle(text_config(TEXT[family])))
    model = load_model(oracle, tmp_path, TEXT[family], attention=attention, missing={"vision", "projector"})
    tokens, mask = torch.randint(0, WORDS, (2, 13)), torch.ones(2, 13, dtype=torch.bool)
    mask[1, 9:] = False
    expected = oracle.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    hidden = normed(model, [model.text("text", tokens, mask, "causal")])
    torch.testing.assert_close(hidden[mask], expected[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma", "gemma 2"])
@torch.no_grad()
def test_bidirectional_images_and_text_give_the_logits_of_paligemma(tmp_path, family):
    oracle = randomised(paligemma_oracle(vision_config(VISION), text_config(TEXT[family])))
    backbone = BACKBONE if family == "gemma" else replace(GEMMA_2, window=32)
    model = load_model(oracle, tmp_path, backbone)
    pixels, tokens = images(2), torch.randint(0, WORDS, (2, 5))
    ids = torch.cat((torch.full((2, VISION.tokens), IMAGE_TOKEN), tokens), dim=1)
    no_mask = torch.zeros(2, 1, ids.shape[1], ids.shape[1])  # an additive mask: nothing is masked, and windows do not apply
    expected = oracle(input_ids=ids, pixel_values=scaled(pixels), attention_mask=no_mask).logits
    logits = normed(model, image_and_text(model, pixels, tokens, "continue")) @ model.vocabulary.weight.T
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_an_image_and_the_text_after_it_give_the_logits_of_gemma_3(tmp_path):
    """The image is bidirectional and fits into a window; the text is causal."""
    pooled = VISION.tokens // 4
    oracle = randomised(gemma_3_oracle(vision_config(VISION), text_config(GEMMA_3), pooled))
    model = load_model(oracle, tmp_path, GEMMA_3, pool=2)
    pixels, tokens = images(2), torch.randint(0, WORDS, (2, 9))
    ids = torch.cat((torch.full((2, pooled), IMAGE_TOKEN), tokens), dim=1)
    expected = oracle(
        input_ids=ids, pixel_values=scaled(pixels), token_type_ids=(ids == IMAGE_TOKEN).long(), attention_mask=ids >= 0
    ).logits
    logits = normed(model, image_and_text(model, pixels, tokens, "causal")) @ model.vocabulary.weight.T
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


def backbone_names(policy):
    """Return the names of a policy's parameters that a published vision-language model has."""
    return {name for name, _ in policy.named_parameters() if name.startswith("model.") and "expert" not in name}


@pytest.mark.parametrize("name", ["pi0", "pi05", "vitra", "pi06", "value"])
def test_a_policy_loads_all_weights_of_its_published_model(tmp_path, name):
    """The models are PaliGemma, PaliGemma 2, Gemma 3, and text-only Gemma 3 with a vision tower that is not loaded."""
    policy = build(name)
    sizes = policy.config.model
    vision, text = vision_config(sizes.vision), text_config(sizes.backbone, sizes.vocabulary)
    oracle = {
        "pi06": lambda: gemma_3_oracle(vision, text, sizes.image_tokens),
        "value": lambda: text_oracle(text),
    }.get(name, lambda: paligemma_oracle(vision, text))()
    oracle.save_pretrained(tmp_path)
    loaded = policy.load_weights(tmp_path)
    expected = backbone_names(policy)
    if name == "value":
        expected = {key for key in expected if not key.startswith(("model.vision.", "model.projector."))}
    assert set(loaded.loaded) == expected
    assert loaded.unexpected == ()
    assert loaded.fitted == {}


def images(number):
    return torch.randint(0, 256, (number, 3, VISION.image, VISION.image), dtype=torch.uint8)


def scaled(pixels):
    return pixels.float() / 127.5 - 1.0


def image_and_text(model, pixels, tokens, attention):
    """Return the blocks of one image and a text after it."""
    image_mask = torch.ones(len(pixels), 1, 1, dtype=torch.bool)
    text = model.text("text", tokens, torch.ones_like(tokens, dtype=torch.bool), attention)
    return [model.images("images", pixels[:, None, None], image_mask), text]


def normed(model: VisionLanguage, blocks) -> torch.Tensor:
    return model.norm(model(concat_blocks(blocks)))


@torch.no_grad()
def test_an_expert_without_adarms_is_gemma_attending_to_the_keys_and_values_of_the_prefix():
    """Expert and backbone with the same weights, in one group, are one Gemma over prefix and suffix."""
    config = BACKBONE
    pair = LayerPair(config, config, 0, Axes(), insulated=False, adaptive=False, prefix_kv_only=False)
    pair.expert.load_state_dict(pair.backbone.state_dict())
    hidden = torch.randn(2, 7, config.width)
    mask, positions = torch.ones(2, 7, 7, dtype=torch.bool), torch.arange(7).expand(2, -1)
    mask[:, :4, 4:] = False
    expected, _ = pair((hidden, mask, positions))
    prefix, suffix = pair(
        (hidden[:, :4], mask[:, :4, :4], positions[:, :4]), (hidden[:, 4:], mask[:, 4:], positions[:, 4:], None)
    )
    torch.testing.assert_close(torch.cat((prefix, suffix), dim=1), expected, rtol=1e-5, atol=1e-5)
