"""The unit of sharding and checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unit(nn.Module):
    """A layer that backends shard, and that recomputes its activations in backward when `checkpointing` is on.

    Subclasses implement `block` instead of `forward`. Checkpointing is inside `forward`, not around the unit, so that a
    sharding backend gathers the parameters first and the recomputation runs while they are gathered. `block` must call
    submodules and never use their parameters directly, because ZeRO-3 gathers when a module is called.
    """

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing

    def forward(self, *args: Any) -> Any:
        if self.checkpointing and self.training and torch.is_grad_enabled():
            # Layers use no random number generator (noise comes with the batch), so there is no state to restore.
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False)
        return self.block(*args)

    def block(self, *args: Any) -> Any:
        """Compute the layer. Takes positional arguments and returns a tensor or a tuple of tensors."""
        raise NotImplementedError
