"""Checkpoints: saving, resuming with any backend and number of ranks, and loading a policy without ranks.

A checkpoint is a folder `step-<n>`:

- `checkpoint.json`: the manifest (`benchbox.store.checkpoints.CheckpointManifest`);
- `tensors/`: weights, buffers, optimizer state and random generators in files of `torch.distributed.checkpoint`, by the names
  of parameters before wrapping, whichever backend saved them (`benchbox.backends.state`);
- `trainer.json`: the schedule, the options of the parameter groups, and the step counts of the optimizer.
"""

from benchbox.trainer.checkpoint.loading import load_policy
from benchbox.trainer.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager", "load_policy"]
