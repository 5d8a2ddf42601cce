"""Low level of pi07: a memory policy that also reads subtask, metadata and subgoal images, all of them optional."""

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

    from ..sequence.token_sequence import Attention, Block


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

    response_tokens: PositiveInt
    metadata_fields: PositiveInt
    metadata_tokens: PositiveInt  # of each field
    drops: DropProbabilities = DropProbabilities()


class ContextPolicy(MemoryPolicy):
    """Prefix: videos, prompt, states, response, metadata, subgoal images, "Action: ", FAST tokens, and words between them.

    Image tokens of a block attend to one another, and so do the states; all text is causal. The response is read and not
    learned. The words of a block that a sample lacks are masked with it, so that its sequence does not depend on the other
    samples in its batch. (OpenTau writes the separators wherever a sample of the batch has any of these blocks.)
    """

    optional: ClassVar[dict[str, str]] = {name: f"{name}_mask" for name in ("response", "metadata", "subgoal")}
    announced: ClassVar[dict[str, tuple[str, ...]]] = {
        "context": tuple(optional),
        "metadata": ("metadata",),
        "context_end": tuple(optional),
        "subgoal": ("subgoal",),
        "subgoal_end": ("subgoal",),
    }
    cue_texts: ClassVar[dict[str, str]] = {
        "state": "State: ",
        "state_end": ":\n",  # or, where context follows:
        "context": ", ",
        "metadata": "Metadata: ",
        "context_end": ";\n ",
        "subgoal": "Subgoal: ",
        "subgoal_end": ", ",
    }
    response_template: ClassVar[str] = "Subtask: {text}, "
    predicted: ClassVar[tuple[str, ...]] = ()
    config: ContextConfig

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        has_context = self.samples_with(self.announced["context"], batch, present)[:, None]
        (state_end,) = self.cue("state_end", batch, present)
        blocks = [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            *self.cue("state", batch, present),
            self.state_block(batch),
            replace(state_end, valid=state_end.valid & ~has_context),
            *self.cue("context", batch, present),
            *([self.text("response", batch, "causal")] if "response" in present else []),
            *self.cue("metadata", batch, present),
            *([self.text("metadata", batch, "causal")] if "metadata" in present else []),
            *self.cue("context_end", batch, present),
        ]
        if "subgoal" in present:
            cameras = split_block(self.subgoal_block(batch), batch["subgoal_mask"].shape[1])
            blocks += [*self.cue("subgoal", batch, present), *cameras, *self.cue("subgoal_end", batch, present)]
        return blocks

    def subgoal_block(self, batch: Batch, attention: Attention = "bidirectional") -> Block:
        """Return the block of the subgoal images of all cameras."""
        return self.model.images("subgoal", batch["subgoal_images"][:, None], batch["subgoal_mask"][:, None], attention)

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
        config, spec = self.config, super().batch_spec()
        return replace(
            spec,
            prompt_template="Task: {task}, ",
            response_template=self.response_template,
            subgoal=True,
            metadata=(config.metadata_fields, config.metadata_tokens),
            uniforms=5 + config.metadata_fields,
            cues={**self.cue_texts, **spec.cues},
            state_normalisation="mean_std",
        )


def split_block(block: Block, parts: int) -> list[Block]:
    """Split a block into parts of equal length, each of which starts a group if the block does."""
    return [
        replace(block, name=f"{block.name} {part}", hidden=hidden, valid=valid)
        for part, (hidden, valid) in enumerate(zip(block.hidden.chunk(parts, 1), block.valid.chunk(parts, 1), strict=True))
    ]
