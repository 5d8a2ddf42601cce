"""Low level of pi07: a memory policy that also reads subtask, subgoal images and metadata, all of them optional."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from ..presets import FORBID_EXTRA, Probability
from ..sequence.presence import drop_from_mask
from .flow_policy import FlowConfig
from .memory_policy import MemoryPolicy

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec

    from ..sequence.token_sequence import Block


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class DropProbabilities:
    """Probabilities of dropping an input in training, so that the policy also acts without it."""

    history: Probability = 0.3
    subgoal: Probability = 0.75
    response: Probability = 0.3  # only where the subgoal is not dropped: otherwise only the task would remain
    metadata: Probability = 0.15  # all fields
    metadata_field: Probability = 0.05  # each field independently


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class ContextConfig(FlowConfig):
    """Configuration of a flow policy with metadata and dropped inputs."""

    metadata_fields: PositiveInt
    metadata_tokens: PositiveInt  # of each field
    drops: DropProbabilities = DropProbabilities()


class ContextPolicy(MemoryPolicy):
    """Prefix: videos, prompt, one state token per step, response, metadata, subgoal images, "Action: ", FAST tokens.

    Image tokens of a block attend to one another; all text is causal.
    """

    optional: ClassVar[dict[str, str]] = {name: f"{name}_mask" for name in ("response", "metadata", "subgoal")}
    config: ContextConfig

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        blocks = [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            self.state_block(batch),
            *(self.text(name, batch, "causal") for name in ("response", "metadata") if name in present),
        ]
        if "subgoal" in present:
            blocks.append(self.model.images("subgoal", batch["subgoal_images"][:, None], batch["subgoal_mask"][:, None]))
        return blocks

    def drop_inputs(self, batch: Batch) -> Batch:
        drops = self.config.drops
        history, subgoal, response, metadata, *fields = batch["uniform"][:, 1:].unbind(dim=1)
        past = torch.arange(self.config.history, device=history.device) < self.config.history - 1
        dropped_steps = ~drop_from_mask(torch.ones_like(batch["history_mask"]), history, drops.history) & past  # (B, T)
        response_mask = drop_from_mask(batch["response_mask"], response, drops.response)
        metadata_mask = drop_from_mask(batch["metadata_mask"], metadata, drops.metadata)  # (B, K, L)
        return {
            **batch,
            "history_mask": batch["history_mask"] & ~dropped_steps,
            "image_mask": batch["image_mask"] & ~dropped_steps[:, :, None],
            "subgoal_mask": drop_from_mask(batch["subgoal_mask"], subgoal, drops.subgoal),
            "response_mask": torch.where((subgoal >= drops.subgoal)[:, None], response_mask, batch["response_mask"]),
            "metadata_mask": metadata_mask & (torch.stack(fields, dim=1) >= drops.metadata_field)[:, :, None],
        }

    def batch_spec(self) -> BatchSpec:
        config = self.config
        metadata = config.metadata_fields, config.metadata_tokens
        return replace(super().batch_spec(), subgoal=True, metadata=metadata, uniforms=5 + config.metadata_fields)
