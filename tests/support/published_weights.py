"""Weights of pi0 and pi05 in the layouts of openpi and LeRobot, with random values.

The layouts are copied from the projects' sources (openpi: `examples/convert_jax_model_to_pytorch.py`; LeRobot:
`policies/pi05/modeling_pi05.py`), independently of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LETTERS = ("v", "vm", "vp", "p", "w", "m", "e", "em", "q", "k", "words", "a")


def sizes(*numbers: int) -> dict[str, int]:
    """Return the sizes that the letters of the tables stand for.

    These are width, MLP, positions and patch of the vision tower; width and MLP of language model and expert; width of all
    queries and of a key; vocabulary; action dimensions.
    """
    named = dict(zip(_LETTERS, numbers, strict=True))
    return named | {"3": 3, "2e": 2 * named["e"], "3e": 3 * named["e"]}


PUBLISHED = sizes(1152, 4304, 256, 14, 2048, 16384, 1024, 4096, 8 * 256, 256, 257152, 32)
PUBLISHED_LAYERS = {"vision": 27, "decoder": 18}

# Published name, parameter name, shape.
_TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
_SINGLE = """
TOWER.embeddings.patch_embedding.weight model.vision.patches.weight v 3 p p
TOWER.embeddings.patch_embedding.bias model.vision.patches.bias v
TOWER.embeddings.position_embedding.weight model.vision.position vp v
TOWER.post_layernorm.weight model.vision.norm.weight v
TOWER.post_layernorm.bias model.vision.norm.bias v
paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight model.projector.weight w v
paligemma_with_expert.paligemma.model.multi_modal_projector.linear.bias model.projector.bias w
paligemma_with_expert.paligemma.lm_head.weight model.vocabulary.weight words w
paligemma_with_expert.paligemma.model.language_model.norm.weight model.norm.weight w
action_in_proj.weight action_in.weight e a
action_in_proj.bias action_in.bias e
action_out_proj.weight action_out.weight a e
action_out_proj.bias action_out.bias a
"""
_VISION = """
layer_norm1.weight attention_norm.weight v
layer_norm1.bias attention_norm.bias v
layer_norm2.weight mlp_norm.weight v
layer_norm2.bias mlp_norm.bias v
self_attn.q_proj.weight query.weight v v
self_attn.q_proj.bias query.bias v
self_attn.k_proj.weight key.weight v v
self_attn.k_proj.bias key.bias v
self_attn.v_proj.weight value.weight v v
self_attn.v_proj.bias value.bias v
self_attn.out_proj.weight output.weight v v
self_attn.out_proj.bias output.bias v
mlp.fc1.weight up.weight vm v
mlp.fc1.bias up.bias vm
mlp.fc2.weight down.weight v vm
mlp.fc2.bias down.bias v
"""
_DECODER = """
self_attn.q_proj.weight query.weight q w
self_attn.k_proj.weight key.weight k w
self_attn.v_proj.weight value.weight k w
self_attn.o_proj.weight output.weight w q
mlp.gate_proj.weight mlp.gate.weight m w
mlp.up_proj.weight mlp.up.weight m w
mlp.down_proj.weight mlp.down.weight w m
"""
_NORMS = """
input_layernorm.weight attention_norm.weight w
post_attention_layernorm.weight mlp_norm.weight w
"""
_ADAPTIVE_NORMS = """
input_layernorm.dense.weight attention_norm.modulation.weight 3w w
input_layernorm.dense.bias attention_norm.modulation.bias 3w
post_attention_layernorm.dense.weight mlp_norm.modulation.weight 3w w
post_attention_layernorm.dense.bias mlp_norm.modulation.bias 3w
"""
_BY_POLICY = {
    "pi0": """
paligemma_with_expert.gemma_expert.model.norm.weight model.expert_norm.weight e
state_proj.weight state_in.weight e a
state_proj.bias state_in.bias e
action_time_mlp_in.weight time_in.weight e 2e
action_time_mlp_in.bias time_in.bias e
action_time_mlp_out.weight time_out.weight e e
action_time_mlp_out.bias time_out.bias e
""",
    "pi05": """
paligemma_with_expert.gemma_expert.model.norm.dense.weight model.expert_norm.modulation.weight 3e e
paligemma_with_expert.gemma_expert.model.norm.dense.bias model.expert_norm.modulation.bias 3e
time_mlp_in.weight time.inner.weight e e
time_mlp_in.bias time.inner.bias e
time_mlp_out.weight time.outer.weight e e
time_mlp_out.bias time.outer.bias e
""",
}
UNUSED_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"  # a text head of the expert, which predicts no text


def table(policy: str, sizes: dict[str, int], layers: dict[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map published names to parameter name and shape, for every tensor but `UNUSED_HEAD`."""
    backbone = "paligemma_with_expert.paligemma.model.language_model.layers"
    expert = "paligemma_with_expert.gemma_expert.model.layers"
    norms = _ADAPTIVE_NORMS if policy == "pi05" else _NORMS
    expert_sizes = sizes | {"w": sizes["e"], "3w": sizes["3e"], "m": sizes["em"]}
    return (
        _rows(_SINGLE + _BY_POLICY[policy], sizes)
        | _layers(_VISION, sizes, layers["vision"], f"{_TOWER}.encoder.layers", "model.vision.layers.{}")
        | _layers(_DECODER + _NORMS, sizes, layers["decoder"], backbone, "model.layers.{}.backbone")
        | _layers(_DECODER + norms, expert_sizes, layers["decoder"], expert, "model.layers.{}.expert")
    )


def _rows(text: str, sizes: dict[str, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    rows = (line.split() for line in text.replace("TOWER", _TOWER).split("\n") if line)
    return {published: (name, tuple(sizes[letter] for letter in shape)) for published, name, *shape in rows}


def _layers(
    text: str, sizes: dict[str, int], number: int, published: str, prefix: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        f"{published}.{layer}.{suffix}": (f"{prefix.format(layer)}.{name}", shape)
        for layer in range(number)
        for suffix, (name, shape) in _rows(text, sizes).items()
    }


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return random tensors of the given shapes."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
