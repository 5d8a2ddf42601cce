"""Inputs of the vision-language models of transformers, from a batch of benchbox. Their forms differ by model type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.image_utils import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from benchbox.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Batch

_DEFAULT_PIXELS = 224  # where images may have any size
_PATCHED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # images as rows of patches
_BY_SAMPLE = ("idefics3", "smolvlm")  # images (B, C, 3, H, W)
_BY_IMAGE = ("paligemma", "gemma3", "llava")  # images (B * C, 3, H, W)
# Images of these are normalised as those of CLIP, and of all others to values from -1 to 1: the defaults of their processors. A
# processor of qwen3_vl has that of qwen2_vl as its class, and other numbers in its file.
_AS_CLIP = ("qwen2_vl", "qwen2_5_vl", "llava")
_IGNORED = -100  # label of a token that is not predicted


def image_size(config: Any, source: str) -> tuple[int, int]:
    """Return (height, width) in pixels.

    Raises:
        UnsupportedError: how the model type takes images is not known here.
    """
    kind = type(config).model_type  # transformers 4 answers for the text model, where its config states a type
    if kind not in (*_PATCHED, *_BY_SAMPLE, *_BY_IMAGE):
        model_types = ", ".join((*_PATCHED, *_BY_SAMPLE, *_BY_IMAGE))
        raise UnsupportedError(
            f"hf:{source}: images of a {kind} are not known here, those of {model_types} are; see benchbox.adapt"
        )
    pixels = getattr(config.vision_config, "image_size", None)
    if pixels is None:
        unit = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        pixels = _DEFAULT_PIXELS // unit * unit
    return (pixels, pixels)


def image_inputs(config: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the keyword arguments of the model: every image, then the prompt, whose next tokens are predicted."""
    images = _normalise(batch["images"][:, -1], type(config).model_type)  # (B, C, 3, H, W)
    cameras, height, width = images.shape[1], *images.shape[-2:]
    vision = config.vision_config
    kind = type(config).model_type  # transformers 4 answers for the text model, where its config states a type
    inputs: dict[str, Tensor] = {}
    if kind in _PATCHED:
        patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        inputs["pixel_values"] = _patch_rows(images.flatten(0, 1), patch, merge, frames)
        grid = torch.tensor([1, height // patch, width // patch])
        inputs["image_grid_thw"] = grid.expand(len(images) * cameras, 3).to(images.device)
        count = (height // patch // merge) * (width // patch // merge)
    elif kind in _BY_SAMPLE:
        inputs["pixel_values"] = images
        count = (height // vision.patch_size // config.scale_factor) ** 2
    else:
        inputs["pixel_values"] = images.flatten(0, 1)
        count = config.mm_tokens_per_image if kind == "gemma3" else (height // vision.patch_size) ** 2
    placeholder = config.image_token_id
    # Qwen's models find the positions of an image by the tokens around it: without them, images are one.
    before, after = ([config.vision_start_token_id], [config.vision_end_token_id]) if kind in _PATCHED else ([], [])
    prompt, mask = batch["prompt_tokens"], batch["prompt_mask"]
    reserved = torch.tensor([*before, placeholder, *after], device=prompt.device)
    prompt = torch.where(torch.isin(prompt, reserved), 0, prompt)  # of generated tokens, some may be those of images
    image = prompt.new_tensor([*before, *[placeholder] * count, *after])
    image_tokens = image.repeat(len(prompt), cameras)
    inputs["input_ids"] = torch.cat((image_tokens, prompt), dim=1)
    inputs["attention_mask"] = torch.cat((torch.ones_like(image_tokens), mask.long()), dim=1)
    ignored = torch.full_like(image_tokens, _IGNORED)
    inputs["labels"] = torch.cat((ignored, torch.where(mask, prompt, _IGNORED)), dim=1)
    if kind in ("gemma3", "paligemma"):
        # 1 for images, which attend to one another; the prompt is predicted, so it is causal
        prompt_type = 0 if kind == "gemma3" else 1
        image_type = 1 if kind == "gemma3" else 0
        types = (torch.full_like(image_tokens, image_type), torch.full_like(prompt, prompt_type))
        inputs["token_type_ids"] = torch.cat(types, dim=1)
    if kind in _PATCHED:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == placeholder).long()
    return inputs


def _normalise(images: Tensor, kind: str) -> Tensor:
    """Return images (..., 3, H, W) uint8 as float32, as the processor of a model type normalises them."""
    mean, deviation = (
        (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if kind in _AS_CLIP else (IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD)
    )
    offset, scale = (images.new_tensor(values, dtype=torch.float32)[:, None, None] for values in (mean, deviation))
    return (images / 255 - offset) / scale


def _patch_rows(images: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Return the patches of images (N, 3, H, W) as rows (N * patches, 3 * frames * patch^2), merged ones in succession."""
    count, channels, height, width = images.shape
    rows, columns = height // patch // merge, width // patch // merge
    blocks = images.reshape(count, channels, rows, merge, patch, columns, merge, patch)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7)  # (N, rows, columns, merge, merge, 3, patch, patch)
    blocks = blocks[..., None, :, :].expand(*blocks.shape[:-2], frames, patch, patch)  # an image is every frame of its patch
    return blocks.reshape(-1, channels * frames * patch * patch)
