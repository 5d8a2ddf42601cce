"""The unit of sharding and checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Unit(nn.Module):
    """A layer that backends shard, and that drops its activations and recomputes them in backward when `checkpointing` is on.

    Subclasses write `block` instead of `forward`. Checkpointing sits inside `forward`, not around the unit, so that whoever
    shards the unit gathers its parameters first: the recomputation then runs while they are gathered.
    Call submodules, never their parameters, because ZeRO-3 gathers at the call.
    """

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing

    def forward(self, *args: Any) -> Any:
        if self.checkpointing and self.training and torch.is_grad_enabled():
            # No layer draws random numbers (they come with the batch), so there is no generator state to restore.
            return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False)
        return self.block(*args)

    def block(self, *args: Any) -> Any:
        """The computation itself. Positional arguments in, a tensor or a tuple of them out."""
        raise NotImplementedError
