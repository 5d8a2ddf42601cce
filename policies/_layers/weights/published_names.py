"""Mapping from names of published tensors to parameter names of the policies.

One table covers every layout, because layouts differ only in the wrapper modules of a name: PaliGemma 1 and 2 and Gemma 3 as
saved by transformers before and since 4.52, text-only Gemma and Qwen 3, SigLIP, and pi0 and pi05 as saved by openpi and
LeRobot.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

VOCABULARY, POSITION = "model.vocabulary.weight", "model.vision.position"
EMBEDDING = "embed_tokens.weight"
TRANSPOSED = "mm_input_projection_weight"  # (in, out), while a linear layer has (out, in)

_WRAPPERS = {"model", "vision_tower", "vision_model", "language_model", "paligemma_with_expert", "paligemma"}

_TENSORS = {
    "embeddings.position_embedding.weight": POSITION,
    f"multi_modal_projector.{TRANSPOSED}": "model.projector.projection.weight",
    EMBEDDING: VOCABULARY,
    "lm_head.weight": VOCABULARY,  # tied: a file has either or both
}
MODULES = {
    "embeddings.patch_embedding": "model.vision.patches",
    "post_layernorm": "model.vision.norm",
    "multi_modal_projector.linear": "model.projector",
    "multi_modal_projector.mm_soft_emb_norm": "model.projector.norm",
    "norm": "model.norm",
    "gemma_expert.norm": "model.expert_norm",
    "state_proj": "state_in",
    "action_in_proj": "action_in",
    "action_out_proj": "action_out",
    "action_time_mlp_in": "time_in",
    "action_time_mlp_out": "time_out",
    "time_mlp_in": "time.inner",
    "time_mlp_out": "time.outer",
}
VISION_LAYER = {
    "layer_norm1": "attention_norm",
    "layer_norm2": "mlp_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.out_proj": "output",
    "mlp.fc1": "up",
    "mlp.fc2": "down",
}
DECODER_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "value",
    "self_attn.o_proj": "output",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
# Gemma 2 and 3 also norm the output of each branch, and use the name of Gemma 1's MLP norm for another norm.
_SANDWICH = {
    "post_attention_layernorm": "output_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "down_norm",
}
_LAYER = re.compile(r"(encoder\.|gemma_expert\.|)layers\.(\d+)\.(.+)")


def parameter_names(published: Collection[str]) -> dict[str, str]:
    """Map published names to parameter names of a policy over a vision-language model; unknown names are left out."""
    sandwich = any(".pre_feedforward_layernorm." in name for name in published)
    decoder = DECODER_LAYER | (_SANDWICH if sandwich else {})
    mapping = {name: _parameter_name(name, decoder) for name in published}
    return {name: parameter_name for name, parameter_name in mapping.items() if parameter_name is not None}


def _parameter_name(published: str, decoder: dict[str, str]) -> str | None:
    bare = ".".join(part for part in published.split(".") if part not in _WRAPPERS)
    module, _, tensor = bare.rpartition(".")
    adaptive = module.endswith(".dense")  # the linear layer of an adaRMS
    module = module.removesuffix(".dense")
    if (layer := _LAYER.fullmatch(module)) is not None:
        tower, number, module = layer.groups()
        prefix, modules = {
            "encoder.": (f"model.vision.layers.{number}", VISION_LAYER),
            "gemma_expert.": (f"model.layers.{number}.expert", decoder),
            "": (f"model.layers.{number}.backbone", decoder),
        }[tower]
        target = f"{prefix}.{modules[module]}" if module in modules else None
    else:
        target = MODULES.get(module)
    if target is None:
        return _TENSORS.get(bare)
    return f"{target}.modulation.{tensor}" if adaptive else f"{target}.{tensor}"
