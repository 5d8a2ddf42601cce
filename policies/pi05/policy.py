"""pi05: state as text; actions as FAST tokens, which teach the backbone, and as a flow, which teaches the expert."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from .._layers.flow_policy import FlowConfig, FlowPolicy
from .._layers.presets import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.registry.contracts import Axes, Batch, BatchSpec

    from .._layers.stream import Block


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


def build(preset: Mapping[str, Any], axes: Axes) -> Pi05:
    """The policy of a preset, in float32 on torch's default device.

    Raises:
        ConfigurationError: the preset is not one.
    """
    return Pi05(read(FlowConfig, preset), axes)
