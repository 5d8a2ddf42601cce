"""Models of transformers by model type or config, with random weights."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from transformers import Gemma2ForCausalLM

from benchbox.adapters.unused import _batch
from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy, policy_entry
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import DataSpec
from tests.support.foreign import built_directly, foreign_cell, materialised

PRESET = policy_entry("hf:llama").presets["tiny"]
TYPES = sorted(PRESET["names"])


def build(source, size="tiny", **axes):
    return build_policy(f"hf:{source}", size, Axes(**{"attention": "native", **axes}))


@pytest.mark.parametrize("kind", TYPES)
def test_every_tiny_config_trains_all_its_parameters_and_is_checkpointed(kind):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = build(kind, checkpointing=checkpointing)
        losses = policy(_batch(policy))
        losses.total.backward()
        assert 4 < float(losses.total.detach()) < 8  # of a uniform guess: ln 384 = 5.95
        assert [name for name, p in policy.named_parameters() if p.grad is None] == []
        gradients.append([p.grad for p in policy.parameters()])
    assert sum(type(module).__name__ == "CheckpointWrapper" for module in policy.modules()) >= 2
    assert (policy.own_samples(0) is not None) == (kind in PRESET["synthetic"])  # planning reads the latter
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_deferred_weights_are_those_of_direct_construction(kind):
    deferred = materialised(foreign_cell(policy=f"hf:{kind}"))
    direct = built_directly(policy=f"hf:{kind}")
    tensors = [dict((*p.module.named_parameters(), *p.module.named_buffers())) for p in (deferred, direct)]
    assert tensors[0].keys() == tensors[1].keys()
    assert [name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])] == []


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_attention_is_switched(kernel):
    assert build("qwen3", attention=kernel).module.config._attn_implementation == kernel


@pytest.mark.parametrize("kind", ["llama", "gemma3", "paligemma"])
def test_flex_attention_computes_what_sdpa_computes(kind):
    """On a CPU it has no backward, so that cells refuse it there; its forward runs uncompiled."""
    losses = []
    for kernel in ("sdpa", "flex"):
        torch.manual_seed(0)
        policy = build(kind, attention=kernel)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            losses.append(float(policy(_batch(policy)).total))
    assert policy.module.config._attn_implementation == "flex_attention"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.skipif(Gemma2ForCausalLM._supports_sdpa, reason="transformers 4 runs Gemma 2 with sdpa, without its soft caps")
def test_a_kernel_that_a_model_lacks_is_refused():
    with pytest.raises(UnsupportedError, match="Gemma2ForCausalLM has no sdpa attention"):
        build("gemma2", attention="sdpa")


def test_the_prompt_follows_the_images_and_only_its_tokens_are_predicted():
    policy = build("paligemma")
    batch = _batch(policy)
    batch["prompt_mask"][0, 5:] = False
    inputs = policy._batch(batch)
    placeholder = policy.module.config.image_token_id
    assert inputs["input_ids"].shape == (2, 16 + 32)  # (32 / 8)^2 tokens of an image
    assert bool((inputs["input_ids"][:, :16] == placeholder).all())
    assert not bool((inputs["input_ids"][:, 16:] == placeholder).any())
    assert (inputs["labels"] != -100).sum(dim=1).tolist() == [5, 32]
    assert inputs["attention_mask"].sum(dim=1).tolist() == [16 + 5, 48]


@pytest.mark.parametrize(("kind", "image_type"), [("paligemma", 0), ("gemma3", 1)])
def test_the_model_is_told_which_tokens_are_those_of_the_images_of_all_cameras(kind, image_type):
    """In PaliGemma type 1 is causal, in Gemma 3 type 0."""
    policy = build(kind, cams=2)
    inputs = policy._batch(_batch(policy))
    placeholders = inputs["input_ids"] == policy.module.config.image_token_id
    count = int(placeholders[0].sum())
    assert placeholders[:, :count].all()
    types = [image_type] * count + [1 - image_type] * (inputs["input_ids"].shape[1] - count)
    assert inputs["token_type_ids"].tolist() == [types] * 2


def test_images_of_qwen_are_between_their_tokens_which_the_prompt_has_none_of():
    policy = build("qwen2_5_vl", cams=2)
    batch = _batch(policy)
    config = policy.module.config
    start, end, placeholder = config.vision_start_token_id, config.vision_end_token_id, config.image_token_id
    batch["prompt_tokens"][0, :4] = torch.tensor([start, end, placeholder, 7])
    inputs = policy._batch(batch)
    grid = inputs["image_grid_thw"]
    count = int(grid[0].prod()) // config.vision_config.spatial_merge_size**2
    image = [start, *[placeholder] * count, end]
    tokens = inputs["input_ids"][0].tolist()
    assert tokens[: 2 * len(image) + 4] == [*image, *image, 0, 0, 0, 7]
    assert torch.equal(inputs["mm_token_type_ids"], (inputs["input_ids"] == placeholder).long())
    assert (inputs["labels"][:, : 2 * len(image)] == -100).all()
    assert len(inputs["pixel_values"]) == int(grid.prod(dim=1).sum())


@pytest.mark.parametrize("kind", ["paligemma", "gemma3", "smolvlm", "qwen2_5_vl"])
def test_the_image_of_every_camera_reaches_the_loss(kind):
    policy = build(kind, cams=2)
    if kind == "gemma3":  # transformers begins with zeros
        torch.nn.init.normal_(policy.module.model.multi_modal_projector.mm_input_projection_weight)
    batch = _batch(policy)
    losses = [float(policy(batch).total)]
    for camera in (0, 1):
        batch["images"][:, :, camera] = 255 - batch["images"][:, :, camera]
        losses.append(float(policy(batch).total))
    assert len(set(losses)) == 3


@pytest.mark.parametrize("kind", ["paligemma", "qwen2_5_vl"])
def test_a_vision_language_model_trains_on_images_and_texts_of_a_dataset(kind):
    """Whatever number of states and actions the dataset has: the model does not read them."""
    cell = replace(foreign_cell(policy=f"hf:{kind}", cams=2, batch=2), data=DataSpec(kind="sample", workers=0))
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, 0)) as batches:
        batch = next(batches)
    assert batch["images"].float().std() > 1
    assert 4 < float(materialised(cell, cams=2)(batch).total) < 8


@pytest.mark.parametrize("kind", ["gemma3", "smolvlm", "qwen2_5_vl"])
def test_defaults_of_transformers_whose_parts_do_not_fit_are_refused(kind):
    with pytest.raises(UnsupportedError, match=f"hf:{kind}: the defaults of transformers .* name a folder"):
        build(kind, size="full")


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("paligemma", "SiglipImageProcessor"),
        ("gemma3", "Gemma3ImageProcessor"),
        ("smolvlm", "SmolVLMImageProcessor"),
        ("qwen2_5_vl", "Qwen2VLImageProcessor"),
    ],
)
def test_images_are_what_the_processor_of_the_model_makes_of_them(kind, processor):
    """Values and, of Qwen, the order of patches: rows that are merged follow one another."""
    policy = build(kind, cams=2)
    batch = _batch(policy)
    batch["images"] = torch.randint(0, 256, batch["images"].shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    vision, options = policy.module.config.vision_config, {}
    if kind == "smolvlm":
        options = {"do_image_splitting": False, "max_image_size": {"longest_edge": batch["images"].shape[-1]}}
    elif kind == "qwen2_5_vl":
        options = {
            "patch_size": vision.patch_size,
            "merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
        }
    processor = getattr(transformers, f"{processor}Pil", None) or getattr(transformers, processor)  # version 5, and 4
    images = [image.permute(1, 2, 0).numpy() for image in batch["images"][:, -1].flatten(0, 1)]
    expected = processor(**options)(images, do_resize=False, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(policy._batch(batch)["pixel_values"].flatten(), expected.flatten(), atol=1e-5, rtol=0)


def test_images_of_llava_are_normalised_as_those_of_clip():
    config, processor = transformers.LlavaConfig(), transformers.CLIPImageProcessor
    images = torch.randint(0, 256, (1, 1, 1, 3, 336, 336), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    prompt = torch.ones(1, 4, dtype=torch.long)
    adapter = import_module("benchbox_policies._adapters.hf.images")
    ours = adapter.image_inputs(config, {"images": images, "prompt_tokens": prompt, "prompt_mask": prompt.bool()})[
        "pixel_values"
    ]
    options = {"do_resize": False, "do_center_crop": False, "return_tensors": "pt"}
    expected = processor()(images[0, 0, 0].permute(1, 2, 0).numpy(), **options)["pixel_values"]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_a_config_folder_is_read_as_it_is(tmp_path):
    config = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"vocab_size": 100, "intermediate_size": 48, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = build(f"{tmp_path}", size="full")
    assert policy.module.config.hidden_size == 32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}  # as every policy is built
    assert policy.own_samples(0).sample(0, 0)["generated_0"].shape == (512,)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("lama", "adapter hf has no policy 'lama' at size tiny; did you mean 'llama'?"),
        ("olmo", "adapter hf has no policy 'olmo' at size tiny; one of "),
        (str(Path(__file__).parent), "there is no config.json in this folder"),
    ],
)
def test_what_is_no_model_is_refused(source, message):
    with pytest.raises(ConfigurationError) as caught:
        build(source)
    assert message in str(caught.value)


def test_a_model_type_that_transformers_lacks_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        build("lama", size="full")
    assert str(caught.value) == "policy hf:lama: transformers has no model type 'lama'; did you mean 'llama'?"


def test_a_model_of_another_kind_is_refused():
    with pytest.raises(UnsupportedError, match="t5: t5 is no causal language model of transformers"):
        build("t5", size="full")
