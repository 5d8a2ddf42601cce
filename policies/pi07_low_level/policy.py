"""pi07, low level: Gemma 3 with history, subtask, metadata and subgoal images.

As OpenTau's low level of `pi07`. What pi06 says about RoPE, dropout and losses holds here too. OpenTau tokenizes the metadata
as one text with a space between two fields; here each field is a text of its own.
"""

from __future__ import annotations

from .._layers.families.context_policy import ContextConfig, ContextPolicy
from .._layers.presets import builder

build = builder(ContextPolicy, ContextConfig)
