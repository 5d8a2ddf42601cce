"""A value function: how far from its end an episode is, as a distribution over bins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import nn

from .._layers.cost.flops import TokenCount, count_language, concat_counts, is_trainable
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
    """A preset: the model, the sizes of what it reads, and the bins of the value."""

    bins: PositiveInt


class Value(PrefixPolicy):
    """Images and prompt see one another; a learned token that reads them is classified into bins of [-1, 0]."""

    config: ValueConfig

    def __init__(self, config: ValueConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.model = VisionLanguage(config.model, axes)
        self.token = nn.Embedding(1, config.model.backbone.width)
        self.head = Linear(config.model.backbone.width, config.bins)

    def blocks(self, batch: Batch, present: frozenset[str]) -> list[Block]:  # noqa: ARG002
        one = torch.zeros_like(batch["dataset_index"])[:, None]
        value = Block(name="value", hidden=self.token(one), valid=one == 0, attention="causal")
        images = self.model.images("images", batch["images"], batch["image_mask"])
        return [images, self.text("prompt", batch, "continue"), value]

    def forward(self, batch: Batch, *, per_sample: bool = False, act: bool = False) -> Any:
        """Cross-entropy of the bin that the return is in. Beside it the mean distance of the expected value from the return
        (`l1`) and how often the likeliest bin is the right one (`accuracy`) are reported.
        """
        if act:
            return self.select_actions(batch)
        batch, present = self.prepare_batch(batch)
        likelihood = self.log_probabilities(batch, present)
        target = self.bin_indices(batch["returns"])
        loss = F.nll_loss(likelihood, target, reduction="none")
        losses = combine_losses({"value": (loss, torch.ones_like(loss))}, per_sample=per_sample)
        with torch.no_grad():
            losses.parts["l1"] = (self.expected(likelihood) - batch["returns"]).abs().mean()
            losses.parts["accuracy"] = (likelihood.argmax(dim=-1) == target).float().mean()
        return losses

    def log_probabilities(self, batch: Batch, present: frozenset[str]) -> Tensor:
        """Of each bin (B, bins), float32."""
        hidden = self.model(concat_blocks(self.blocks(batch, present)))[:, -1]
        return self.head(self.model.norm(hidden)).float().log_softmax(dim=-1)

    def bin_indices(self, returns: Tensor) -> Tensor:
        """Returns (B,) in [-1, 0] to the nearest of the bins (B,) int64, whose centres are evenly spaced from -1 to 0."""
        return ((returns.clamp(-1, 0) + 1) * (self.config.bins - 1)).round().long()

    def expected(self, likelihood: Tensor) -> Tensor:
        """The mean (B,) of the distributions whose logarithm (B, bins) is given."""
        centres = torch.linspace(-1, 0, self.config.bins, device=likelihood.device)
        return (likelihood.exp() * centres).sum(dim=-1)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        return super().count_blocks(tally, batch, present) | {"value": TokenCount(1, is_trainable(self.token))}

    def count_losses(self, tally: FlopTally, blocks: dict[str, TokenCount]) -> None:
        hidden = count_language(tally, self.model, concat_counts(blocks))
        tally.through(self.head, 1, hidden.below or is_trainable(self.model.norm))

    def batch_spec(self) -> BatchSpec:
        return replace(super().batch_spec(), returns=True)


build = builder(Value, ValueConfig)
