"""pi07, low level, on PaliGemma: the sizes of pi05 with the prefix of pi07_low_level."""

from __future__ import annotations

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

build = builder(ContextPolicy, ContextConfig)
