"""A value function: the return, which measures the steps left in an episode, as a distribution over bins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .._layers.cost.flops import TokenCount, concat_counts, count_language, is_trainable
from .._layers.families.losses import combine_losses
from .._layers.families.prefix_policy import PrefixConfig, PrefixPolicy
from .._layers.families.vision_language import VisionLanguage
from .._layers.nn.precision import Linear
from .._layers.presets import FORBID_EXTRA, builder
from .._layers.sequence.token_sequence import Block, concat_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from benchbox.registry.contracts import Axes, Batch, BatchSpec

    from .._layers.cost.flops import FlopTally


@dataclass(config=FORBID_EXTRA, frozen=True, slots=True, kw_only=True)
class ValueConfig(PrefixConfig):
    """Configuration of the value function: the model, the sizes of its inputs, and the bins of the value."""

    bins: PositiveInt


class Value(PrefixPolicy):
    """Images and prompt attend to one another; a learned token after them is classified into bins of [-1, 0]."""

    config: ValueConfig

    def __init__(self, config: ValueConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)
        self.token = nn.Embedding(1, config.model.backbone.width)
        self.head = Linear(config.model.backbone.width, config.bins)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:  # noqa: ARG002
        zeros = torch.zeros_like(batch["dataset_index"])[:, None]
        value = Block(name="value", hidden=self.token(zeros), valid=zeros == 0, attention="causal")
        images = self.model.images("images", batch["images"], batch["image_mask"])
        return [images, self.text("prompt", batch, "continue"), value]

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Return the cross-entropy of the return's bin.

        Also reported are the mean distance of the expected value from the return (`l1`) and the share of samples whose most
        likely bin is the correct one (`accuracy`).
        """
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        log_probabilities = self.log_probabilities(batch, present)
        target = self.bin_indices(batch["returns"])
        loss = F.nll_loss(log_probabilities, target, reduction="none")
        losses = combine_losses({"value": (loss, torch.ones_like(loss))}, per_sample=per_sample)
        with torch.no_grad():
            losses.parts["l1"] = (self.expected_value(log_probabilities) - batch["returns"]).abs().mean()
            losses.parts["accuracy"] = (log_probabilities.argmax(dim=-1) == target).float().mean()
        return losses

    def log_probabilities(self, batch: Batch, present: frozenset[str]) -> Tensor:
        """Return the log-probability of each bin: (B, bins) float32."""
        hidden = self.model(concat_blocks(self.blocks(batch, present)))[:, -1]
        return self.head(self.model.norm(hidden)).float().log_softmax(dim=-1)

    def bin_indices(self, returns: Tensor) -> Tensor:
        """Map returns (B,) in [-1, 0] to the nearest bins (B,) int64, whose centres are evenly spaced from -1 to 0."""
        return ((returns.clamp(-1, 0) + 1) * (self.config.bins - 1)).round().long()

    def expected_value(self, log_probabilities: Tensor) -> Tensor:
        """Return the mean (B,) of distributions with log-probabilities (B, bins)."""
        centres = torch.linspace(-1, 0, self.config.bins, device=log_probabilities.device)
        return (log_probabilities.exp() * centres).sum(dim=-1)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        return super().count_blocks(tally, batch, present) | {"value": TokenCount(1, is_trainable(self.token))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        hidden = count_language(tally, self.model, concat_counts(blocks))
        tally.count_linear(self.head, 1, hidden.requires_grad or is_trainable(self.model.norm))

    def batch_spec(self) -> BatchSpec:
        return replace(super().batch_spec(), returns=True)


build = builder(Value, ValueConfig)
