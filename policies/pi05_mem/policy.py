"""pi05 with a memory: videos through a space-time encoder, and the states along them as tokens instead of as text.

Of pi05's weights all have a place here, the vision tower's too. Only the projection of states is new.
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
    """Videos, prompt and states see one another; response, "Action: " and FAST tokens follow causally (as in OpenTau)."""

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        seen = [self.model.images("images", batch["images"], batch["image_mask"]), self.text("prompt", batch, "continue")]
        said = [self.text("response", batch, "causal")] if "response" in present else []
        return [*seen, self.history(batch, "continue"), *said, self.cue("action", batch)]


build = builder(Pi05Mem, FlowConfig)
