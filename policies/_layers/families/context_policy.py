"""pi07's low level: told of its past, its subtask, its subgoal and the episode, any of which it may have to do without."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from ..presets import FORBID_EXTRA
from ..sequence.presence import kept
from .flow_policy import FlowConfig
from .memory_policy import MemoryPolicy

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from ..sequence.token_sequence import Block

Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class DropProbabilities:
    """How often training leaves out what a robot may not have: probabilities."""

    history: Probability = 0.3
    subgoal: Probability = 0.75
    response: Probability = 0.3  # where the subgoal is kept: without both the task would be all there is
    metadata: Probability = 0.15  # all fields
    metadata_field: Probability = 0.05  # each field by itself


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class ContextConfig(FlowConfig):
    """A flow policy's sizes, and those of its metadata."""

    metadata_fields: PositiveInt
    metadata_tokens: PositiveInt  # of each field
    drops: DropProbabilities = DropProbabilities()


class ContextPolicy(MemoryPolicy):
    """Prefix: videos, prompt, one state token for each step, response, metadata, subgoal images, "Action: ", FAST tokens.

    Images of a block see one another, all text is causal.
    """

    optional: ClassVar[dict[str, str]] = {name: f"{name}_mask" for name in ("response", "metadata", "subgoal")}
    config: ContextConfig

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        blocks = [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            self.history(batch),
            *(self.text(name, batch, "causal") for name in ("response", "metadata") if name in present),
        ]
        if "subgoal" in present:
            blocks.append(self.model.images("subgoal", batch["subgoal_images"][:, None], batch["subgoal_mask"][:, None]))
        return [*blocks, self.cue("action", batch)]

    def dropped(self, batch: Batch) -> Batch:
        drops = self.config.drops
        history, subgoal, response, metadata, *fields = batch["uniform"][:, 1:].unbind(dim=1)
        past = torch.arange(self.config.history, device=history.device) < self.config.history - 1
        forget = ~kept(torch.ones_like(batch["history_mask"]), history, drops.history) & past  # (B, T)
        keep_response = kept(batch["response_mask"], response, drops.response)
        whole_metadata = kept(batch["metadata_mask"], metadata, drops.metadata)  # (B, K, L)
        return {
            **batch,
            "history_mask": batch["history_mask"] & ~forget,
            "image_mask": batch["image_mask"] & ~forget[:, :, None],
            "subgoal_mask": kept(batch["subgoal_mask"], subgoal, drops.subgoal),
            "response_mask": torch.where((subgoal >= drops.subgoal)[:, None], keep_response, batch["response_mask"]),
            "metadata_mask": whole_metadata & (torch.stack(fields, dim=1) >= drops.metadata_field)[:, :, None],
        }

    def batch_spec(self) -> BatchSpec:
        config = self.config
        metadata = config.metadata_fields, config.metadata_tokens
        return replace(super().batch_spec(), subgoal=True, metadata=metadata, uniforms=5 + config.metadata_fields)
