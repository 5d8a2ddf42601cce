"""pi05 with a memory: videos through a space-time encoder, and one state token per frame instead of state as text.

All weights of pi05 can be loaded, including the vision tower's. Only the projection of states is new: the same linear layer as
OpenTau's `state_proj` and the `proprio_history_proj` of LeRobot's pi05 with memory, whose weights load too. LeRobot puts the
states before the prompt, OpenTau, as here, after it: both are one group of attention, and only their positions differ (0.8% of
the velocity with random weights, `tests/parity/test_opentau.py`). States and actions are normalised by quantiles as in LeRobot,
because the weights of pi05 act in these units; OpenTau normalises by mean and deviation. OpenTau's policy has no response;
where the data has none, the sequence is the same. What pi06 says about `<bos>`, dropout and losses holds here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from .._layers.families.flow_policy import FlowConfig
from .._layers.families.memory_policy import MemoryPolicy
from .._layers.presets import builder

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


class Pi05Mem(MemoryPolicy):
    """Videos, prompt, which ends with "Actions:", and states attend to one another; response and FAST tokens are causal."""

    optional: ClassVar[dict[str, str]] = {"response": "response_mask"}
    fast_cue: ClassVar[str] = ""

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "continue"),
            self.state_block(batch, "continue"),
            *([self.text("response", batch, "causal")] if "response" in present else []),
        ]

    def batch_spec(self) -> BatchSpec:
        return replace(
            super().batch_spec(),
            prompt_template="Task: {task}<eos>Actions:",
            state_normalisation="quantile",
            action_normalisation="quantile",
        )


build = builder(Pi05Mem, FlowConfig)
