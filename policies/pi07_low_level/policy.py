"""pi07, low level: Gemma 3 with history, subtask, metadata and subgoal images."""

from __future__ import annotations

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

build = builder(ContextPolicy, ContextConfig)
