"""pi07, high level: predicts memory and subtask as text. It has no expert and does not act.

As OpenTau's high-level planner of `pi07`. What pi06 says about RoPE, quantiles, `<bos>`, dropout and losses holds here too.
OpenTau's target is the memory of the next frame and its past memory that of the current one; here they are those of the current
frame and of the one before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from .._layers.families.losses import combine_losses, text_losses
from .._layers.families.prefix_policy import PrefixConfig, PrefixPolicy
from .._layers.families.vision_language import VisionLanguage
from .._layers.presets import FORBID_EXTRA, builder
from .._layers.sequence.token_sequence import concat_blocks

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch, BatchSpec

    from .._layers.sequence.token_sequence import Block


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class HighLevelConfig(PrefixConfig):
    """Configuration of the high level: the model, and the sizes of its inputs and predicted texts."""

    response_tokens: PositiveInt
    memory_tokens: PositiveInt
    metadata_fields: PositiveInt
    metadata_tokens: PositiveInt  # of each field


class Pi07HighLevel(PrefixPolicy):
    """Prefix: images, prompt, metadata, "Updated Memory: ", memory, "Subtask: ", response. All text is causal.

    The prompt contains the past memory and the state. The words of the metadata are masked with it, as in `ContextPolicy`.
    """

    optional: ClassVar[dict[str, str]] = {"metadata": "metadata_mask"}
    announced: ClassVar[dict[str, tuple[str, ...]]] = {"metadata": ("metadata",), "metadata_end": ("metadata",)}
    predicted: ClassVar[tuple[str, ...]] = ("memory", "response")  # the only losses, so these blocks are never optional
    config: HighLevelConfig

    def __init__(self, config: HighLevelConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        return [
            self.model.images("images", batch["images"], batch["image_mask"]),
            self.text("prompt", batch, "causal"),
            *self.cue("metadata", batch, present),
            *([self.text("metadata", batch, "causal")] if "metadata" in present else []),
            *self.cue("metadata_end", batch, present),
            *self.cue("memory", batch, present),
            self.text("memory", batch, "causal"),
            *self.cue("response", batch, present),
            self.text("response", batch, "causal"),
        ]

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:  # noqa: ARG002
        """Return the token losses. As published, there are no losses per sample: `per_sample` stays None."""
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        prefix = concat_blocks(self.blocks(batch, present))
        hidden = self.model(prefix)
        terms = text_losses(prefix, self.predicted, partial(self.token_losses, sequence=prefix, hidden=hidden))
        return combine_losses(terms, per_sample=False)

    def batch_spec(self) -> BatchSpec:
        config = self.config
        return replace(
            super().batch_spec(),
            state_in_prompt=True,
            lowest_bin=0,
            prompt_template="Task: {task}, Past Memory: {memory}, State: {state}, ",
            memory_tokens=config.memory_tokens,
            sole_targets=self.predicted,
            metadata=(config.metadata_fields, config.metadata_tokens),
            cues={
                "metadata": "Metadata: ",
                "metadata_end": ";\n ",
                "memory": "Updated Memory: ",
                "response": "Subtask: ",
            },
        )


build = builder(Pi07HighLevel, HighLevelConfig)
