"""A policy that is told where it has been: videos instead of images, and a state for each of their frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..cost.flops import TokenCount
from ..nn.precision import Linear
from ..sequence.token_sequence import Attention, Block
from .flow_policy import FlowConfig, FlowPolicy

if TYPE_CHECKING:
    from benchbox.registry.contracts import Axes, Batch

    from ..cost.flops import FlopTally


class MemoryPolicy(FlowPolicy):
    """A `FlowPolicy` whose backbone reads states as tokens, one for each step of the history."""

    reads_state: ClassVar[bool] = True

    def __init__(self, config: FlowConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.state_in = Linear(config.state_dim, config.model.backbone.width)

    def history(self, batch: Batch, attention: Attention = "bidirectional") -> Block:
        """The block of states. They see one another; steps before the episode began are padding."""
        hidden = self.state_in(self.states(batch))
        return Block(name="states", hidden=hidden, valid=batch["history_mask"], attention=attention)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        blocks = super().count_blocks(tally, batch, present)
        steps = batch["state"].shape[1]
        blocks["states"] = TokenCount(steps, tally.through(self.state_in, steps, below=False))
        return blocks
