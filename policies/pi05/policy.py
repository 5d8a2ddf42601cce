"""pi05: state as text; actions as FAST tokens, which teach the backbone, and as a flow, which teaches the expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig, FlowPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


class Pi05(FlowPolicy):
    """Images and the prompt, with the state in it, see one another; response, "Action: " and FAST tokens follow causally."""

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            *([self.text("response", batch, "causal")] if "response" in present else []),
            self.cue("action", batch),
        ]

    def batch_spec(self) -> BatchSpec:
        return replace(super().batch_spec(), state_in_prompt=True)


build = builder(Pi05, FlowConfig)
