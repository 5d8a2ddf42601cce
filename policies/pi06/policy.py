"""pi06: pi05 on Gemma 3, with causal text and fewer denoising steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig, FlowPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


class Pi06(FlowPolicy):
    """Images attend to one another; prompt, which contains the state, response, "Action: " and FAST tokens are causal."""

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            *([self.text("response", batch, "causal")] if "response" in present else []),
        ]

    def batch_spec(self) -> BatchSpec:
        return replace(super().batch_spec(), state_in_prompt=True)


build = builder(Pi06, FlowConfig)
