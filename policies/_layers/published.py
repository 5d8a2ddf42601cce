"""Names of published weights, in the words used here."""

from __future__ import annotations

import re

_PALIGEMMA = (
    (r"^vision_tower\.(vision_model\.)?", "vision."),
    (r"embeddings\.patch_embedding", "patches"),
    (r"embeddings\.position_embedding\.weight", "position"),
    (r"encoder\.layers", "layers"),
    (r"post_layernorm", "norm"),
    (r"^multi_modal_projector\.linear", "projector"),
    (r"^language_model\.model\.embed_tokens", "vocabulary"),
    (r"^language_model\.model\.layers\.(\d+)", r"layers.\1.backbone"),
    (r"^language_model\.model\.norm", "norm"),
    (r"layer_norm1|input_layernorm", "attention_norm"),
    (r"layer_norm2|post_attention_layernorm", "mlp_norm"),
    (r"self_attn\.q_proj", "query"),
    (r"self_attn\.k_proj", "key"),
    (r"self_attn\.v_proj", "value"),
    (r"self_attn\.(out|o)_proj", "output"),
    (r"mlp\.fc1", "up"),
    (r"mlp\.fc2", "down"),
    (r"mlp\.(gate|up|down)_proj", r"mlp.\1"),
)


def paligemma_name(published: str) -> str:
    """The name in `PaliGemma` of a tensor of a published PaliGemma safetensors file; shapes are the same."""
    for pattern, ours in _PALIGEMMA:
        published = re.sub(pattern, ours, published)
    return published
