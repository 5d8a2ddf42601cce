"""Export of pi0 and pi05 under the names of openpi, which LeRobot reads too: the inverse of `published_names`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox.errors import UnsupportedError

from .published_names import DECODER_LAYER, MODULES, POSITION, VISION_LAYER, VOCABULARY

if TYPE_CHECKING:
    from torch import Tensor, nn

_PALIGEMMA, _EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
_HEAD = f"{_PALIGEMMA}lm_head.weight"
_EXPERT_HEAD = f"{_EXPERT}lm_head.weight"
_VISION = f"{_PALIGEMMA}model.vision_tower.vision_model."
_LANGUAGE = f"{_PALIGEMMA}model.language_model."
_WRAPPERS = {  # by the first part of a name without them
    "embeddings": _VISION,
    "encoder": _VISION,
    "post_layernorm": _VISION,
    "multi_modal_projector": f"{_PALIGEMMA}model.",
    "layers": _LANGUAGE,
    "norm": _LANGUAGE,
}
_LAYER = re.compile(r"(model\.(?:vision\.)?layers)\.(\d+)\.((?:backbone\.|expert\.)?)(.+)")
_MODULE_NAMES = {target: name for name, target in reversed(MODULES.items())}  # the first of several names
_TOWERS = {  # prefix of a layer, and the names of its modules
    "model.vision.layers": ("encoder.", {target: name for name, target in VISION_LAYER.items()}),
    "model.layers.backbone.": ("", {target: name for name, target in DECODER_LAYER.items()}),
    "model.layers.expert.": ("gemma_expert.", {target: name for name, target in DECODER_LAYER.items()}),
}
_ACTION = {"action_in", "action_out"}
_HEADS = ({*_ACTION, "state_in", "time_in", "time_out"}, {*_ACTION, "time.inner", "time.outer"})  # of pi0, of pi05


def published_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a pi0 or pi05 under the names of openpi's PyTorch checkpoints, which LeRobot reads too.

    The tensors are detached and keep their dtype. Text embedding and output head are one tensor, as published. The expert's
    output head, which is in the published files and has no effect, is zero.

    Args:
        policy: unwrapped, with whole parameters.

    Raises:
        UnsupportedError: the projects have no such policy: one with FAST tokens, for example, has weights that they have no
            name for, and its expert reads another prompt.
    """
    parameters = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    heads = {name.rpartition(".")[0] for name in parameters if not name.startswith("model.")}
    names = {name: _published_name(name) for name in parameters}
    unknown = [name for name, published in names.items() if published is None]
    if unknown or heads not in _HEADS:
        example = unknown[0] if unknown else ", ".join(sorted(heads))
        raise UnsupportedError(
            f"{type(policy).__name__} cannot be exported: openpi and LeRobot have no weights for its {example}; they have pi0, "
            "and pi05 as in its presets tiny_flow and full_flow"
        )
    tensors = {str(names[name]): tensor.contiguous() for name, tensor in parameters.items()}
    words, width = len(parameters[VOCABULARY]), len(parameters["action_in.weight"])
    return tensors | {_EXPERT_HEAD: parameters[VOCABULARY].new_zeros(words, width)}


def _published_name(parameter_name: str) -> str | None:
    if parameter_name == VOCABULARY:
        return _HEAD
    if parameter_name == POSITION:
        return f"{_VISION}embeddings.position_embedding.weight"
    module, _, tensor = parameter_name.rpartition(".")
    adaptive = ".dense" if module.endswith(".modulation") else ""  # the linear layer of an adaRMS
    name = _module_name(module.removesuffix(".modulation"))
    if name is None:
        return None
    first, _, remainder = name.partition(".")
    wrapped = f"{_EXPERT}model.{remainder}" if first == "gemma_expert" else _WRAPPERS.get(first, "") + name
    return f"{wrapped}{adaptive}.{tensor}"


def _module_name(module: str) -> str | None:
    """Return the published name of a module without its wrappers, or None."""
    if (layer := _LAYER.fullmatch(module)) is None:
        return _MODULE_NAMES.get(module)
    layers, number, part, module = layer.groups()
    prefix, names = _TOWERS[f"{layers}.{part}" if part else layers]
    return f"{prefix}layers.{number}.{names[module]}" if module in names else None
