"""Flow policies with a memory: videos instead of images, and the state of each frame."""

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
    """A `FlowPolicy` whose prefix has one token for the state at each step of the history."""

    reads_state: ClassVar[bool] = True

    def __init__(self, config: FlowConfig, axes: Axes) -> None:
        super().__init__(config, axes)
        self.state_in = Linear(config.state_dim, config.model.backbone.width)

    def state_block(self, batch: Batch, attention: Attention = "bidirectional") -> Block:
        """Return the block of states; steps before the start of the episode are padding."""
        hidden = self.state_in(self.normalised_states(batch))
        return Block(name="states", hidden=hidden, valid=batch["history_mask"], attention=attention)

    def count_blocks(self, tally: FlopTally, batch: Batch, present: frozenset[str]) -> dict[str, TokenCount]:
        blocks = super().count_blocks(tally, batch, present)
        steps = batch["state"].shape[1]
        blocks["states"] = TokenCount(steps, tally.count_linear(self.state_in, steps, input_requires_grad=False))
        return blocks
