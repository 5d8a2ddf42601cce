"""Arguments of rotary embeddings for configurations of `transformers`, whose version 5 renamed them."""

from __future__ import annotations

from typing import Any

import transformers

_HAS_ROPE_PARAMETERS = int(transformers.__version__.partition(".")[0]) >= 5


def rope_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a configuration, given its `rope_parameters` as in transformers 5.

    Args:
        parameters: of all layers, or of each type of layers as in Gemma 3: `full_attention` and `sliding_attention`.
    """
    if _HAS_ROPE_PARAMETERS:
        return {"rope_parameters": parameters}
    full = dict(parameters.get("full_attention", parameters))
    arguments = {"rope_theta": full.pop("rope_theta")}
    if set(full) != {"rope_type"} or full["rope_type"] != "default":
        arguments["rope_scaling"] = full
    if "sliding_attention" in parameters:
        sliding = parameters["sliding_attention"]
        assert sliding["rope_type"] == "default", "transformers 4 scales the positions of full attention only"
        arguments["rope_local_base_freq"] = sliding["rope_theta"]
    return arguments
