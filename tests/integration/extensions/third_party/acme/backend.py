"""DDP that compresses gradients for the all-reduce, and how it is recognised."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchbox.backends.replicated import Ddp

if TYPE_CHECKING:
    from torch import nn

    from benchbox.backends.base import Prepared


class DdpBf16(Ddp):
    name = "acme_ddp_bf16"

    def _prepare(self, *arguments: Any) -> Prepared:
        prepared = super()._prepare(*arguments)
        # A fallback that says nothing, such as real libraries have: without the hook this is plain DDP.
        if "ACME_FALLS_BACK" not in os.environ:
            prepared.model.register_comm_hook(None, bf16_compress_hook)
        return prepared


def recognise(model: nn.Module, optimizers: list[Any]) -> str | None:
    """Return a description if the model is DDP with the compressing hook."""
    if not isinstance(model, DistributedDataParallel):
        return None
    hooks = [hook for hook, _ in model._comm_hooks]
    return "replicated, gradients all-reduced in bfloat16" if bf16_compress_hook in hooks else None
