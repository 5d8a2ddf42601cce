"""pi05 with a memory: videos through a space-time encoder, and one state token per frame instead of state as text.

All weights of pi05 can be loaded, including the vision tower's. Only the projection of states is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig
from .._layers.families.memory_policy import MemoryPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch

    from .._layers.sequence.token_sequence import Block


class Pi05Mem(MemoryPolicy):
    """Videos, prompt and states attend to one another; response, "Action: " and FAST tokens are causal (as in OpenTau)."""

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            self.state_block(batch, "continue"),
            *([self.text("response", batch, "causal")] if "response" in present else []),
        ]


build = builder(Pi05Mem, FlowConfig)
