"""pi07, low level, as it was on PaliGemma: the sizes of pi05 under the same prefix."""

from __future__ import annotations

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

build = builder(ContextPolicy, ContextConfig)
