"""pi07, high level: predicts memory and subtask as text. It has no expert and does not act."""

from __future__ import annotations

from dataclasses import replace
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

    memory_tokens: PositiveInt
    metadata_fields: PositiveInt
    metadata_tokens: PositiveInt  # of each field


class Pi07HighLevel(PrefixPolicy):
    """Prefix: images, prompt, metadata, "Updated Memory: ", memory, "Subtask: ", response. All text is causal."""

    optional: ClassVar[dict[str, str]] = {"metadata": "metadata_mask"}
    predicted: ClassVar[tuple[str, ...]] = ("memory", "response")  # the only losses, so these blocks are never optional
    config: HighLevelConfig

    def __init__(self, config: HighLevelConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:
        blocks = [self.model.images("images", batch["images"], batch["image_mask"])]
        for name in ("prompt", "metadata", "memory", "response"):
            if name in self.predicted:
                blocks.append(self.cue(name, batch))
            if name != "metadata" or name in present:
                blocks.append(self.text(name, batch, "causal"))
        return blocks

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:  # noqa: ARG002
        """Return the token losses. As published, there are no losses per sample: `per_sample` stays None."""
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        prefix = concat_blocks(self.blocks(batch, present))
        hidden = self.model(prefix)
        terms = text_losses(prefix, self.predicted, lambda name: self.logits(name, prefix, hidden))
        return combine_losses(terms, per_sample=False)

    def batch_spec(self) -> BatchSpec:
        config = self.config
        return replace(
            super().batch_spec(),
            state_in_prompt=True,
            memory_tokens=config.memory_tokens,
            metadata=(config.metadata_fields, config.metadata_tokens),
            cues={"memory": "Updated Memory: ", "response": "Subtask: "},
        )


build = builder(Pi07HighLevel, HighLevelConfig)
