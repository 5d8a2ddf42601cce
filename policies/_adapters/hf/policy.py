"""Models of transformers: causal language models and vision-language models, by a local config, with random weights.

`hf:qwen2` is a model type: a small config at size tiny, else the library's defaults. `hf:path/to/config` is a folder with a
`config.json`. Nothing is downloaded.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import benchbox
from benchbox.errors import ConfigurationError, Problem, UnsupportedError
from benchbox.registry.names import did_you_mean

from .images import image_inputs, image_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec, Policy

ATTENTION = ("eager", "sdpa", "flex", "native")

# Of the model types whose images are known, those whose default vision and text parts fit together. Others have an image
# token outside of the vocabulary, for example, or a projection to another width than the text's.
_FITTING_DEFAULTS = ("paligemma",)
_MOST_DIMENSIONS = 256  # of the states and actions of a dataset, which these models do not read


def build(preset: Mapping[str, Any], axes: Axes, source: str) -> Policy:
    """Build a model in float32 on torch's default device.

    Raises:
        ConfigurationError: there is no such model type or config.
        UnsupportedError: transformers builds no such model, or its images have a form that this adapter does not know.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tiny_configs = preset.get("names")
    config = _read_config(source, tiny_configs)
    text = config.get_text_config()
    for part in {id(part): part for part in (config, text)}.values():
        part.use_cache = False  # of generation: recomputation would fill it twice
    tokens = preset["tokens"]
    with_images = hasattr(config, "vision_config")
    # Before the model is built, because one that is refused may be larger than the memory.
    spec = _batch_spec(config, axes, source, tokens=tokens, tiny=tiny_configs is not None) if with_images else None
    model_class = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    try:
        model = model_class.from_config(config, torch_dtype=torch.float32)
    except ValueError as error:
        if "Unrecognized configuration" not in str(error):
            raise
        kind = "vision-language" if with_images else "causal language"
        raise UnsupportedError(f"{source}: {config.model_type} is no {kind} model of transformers") from None
    if spec is None:
        return benchbox.adapt(model, loss=_loss, batch=_RandomTokens(text.vocab_size, tokens))
    return benchbox.adapt(model, loss=_loss, batch=lambda batch: image_inputs(config, batch), spec=spec)


def _batch_spec(config: Any, axes: Axes, source: str, *, tokens: int, tiny: bool) -> BatchSpec:
    """Return what a vision-language model reads: images and a prompt.

    Raises:
        UnsupportedError: how its images are taken is not known, or the parts of its config do not fit together.
    """
    from benchbox.registry.contracts import BatchSpec

    size = image_size(config, source)
    if source not in _FITTING_DEFAULTS and not tiny and not Path(source).is_dir():
        raise UnsupportedError(
            f"hf:{source}: the defaults of transformers for this model type are those of different models, and do not fit "
            "together; name a folder with the config.json of one: hf:path/to/config"
        )
    return BatchSpec(
        cameras=axes.cams,
        image_size=size,
        state_dim=_MOST_DIMENSIONS,
        action_dim=_MOST_DIMENSIONS,
        horizon=1,
        prompt_tokens=tokens,
        text_vocab=config.get_text_config().vocab_size,
        state_normalisation="identity",
        action_normalisation="identity",
    )


class _RandomTokens:
    """Batches of random tokens, of which the model predicts every next one."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length

    def __call__(self, size: int, seed: int) -> Batch:
        tokens = torch.randint(self._vocabulary, (size, self._length), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": tokens, "labels": tokens}


def _loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _read_config(source: str, tiny_configs: Mapping[str, Any] | None) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise ConfigurationError(Problem(source, "there is no config.json in this folder"))
        return AutoConfig.from_pretrained(source, local_files_only=True)
    if source not in CONFIG_MAPPING:
        hint = did_you_mean(source, CONFIG_MAPPING) or "a folder is written with a slash, as in hf:./config"
        raise ConfigurationError(Problem(f"policy hf:{source}", f"transformers has no model type {source!r}", hint))
    return AutoConfig.for_model(source, **(deepcopy(tiny_configs[source]) if tiny_configs else {}))  # it may change them
