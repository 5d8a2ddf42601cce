"""pi07, low level: Gemma 3, and all the context there is."""

from __future__ import annotations

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

build = builder(ContextPolicy, ContextConfig)
