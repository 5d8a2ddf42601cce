"""DDP that compresses gradients for the all-reduce, and how it is recognised."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchbox.backends.replicated import Ddp

if TYPE_CHECKING:
    from torch import nn

    from benchbox.backends.base import Prepared


def reduce_in_bf16(_, bucket):  # torch compares annotations with its classes, and refuses those that are strings
    """Average a bucket of gradients in bfloat16. torch's own hook of this kind requires NCCL."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    reduced = dist.all_reduce(compressed, async_op=True).get_future()
    return reduced.then(lambda future: bucket.buffer().copy_(future.value()[0]))


class DdpBf16(Ddp):
    name = "acme_ddp_bf16"

    def _prepare(self, *arguments: Any) -> Prepared:
        prepared = super()._prepare(*arguments)
        # A silent fallback, such as real libraries have: without the hook this is plain DDP.
        if "ACME_FALLS_BACK" not in os.environ:
            prepared.model.register_comm_hook(None, reduce_in_bf16)
        return prepared


def recognise(model: nn.Module, optimizers: list[Any]) -> str | None:
    """Return a description if the model is DDP with the compressing hook."""
    if not isinstance(model, DistributedDataParallel):
        return None
    hooks = [hook for hook, _ in model._comm_hooks]
    return "replicated, gradients all-reduced in bfloat16" if reduce_in_bf16 in hooks else None
