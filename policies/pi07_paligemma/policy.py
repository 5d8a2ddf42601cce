"""pi07, low level, as it was on PaliGemma: the sizes of pi05 under the same prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._layers.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes


def build(preset: Mapping[str, Any], axes: Axes) -> ContextPolicy:
    """The policy of a preset, in float32 on torch's default device.

    Raises:
        ConfigurationError: the preset is not one.
    """
    return ContextPolicy(read(ContextConfig, preset), axes)
