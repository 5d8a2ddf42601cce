"""One of two real ranks: steps a small model under DDP, FSDP1 and FSDP2 and writes down which collectives were counted."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode

ELEMENTS = 8 * 8 + 8


def layer(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8).to(dtype)


def counted(model: nn.Module, dtype: torch.dtype, *, clip: bool = False) -> dict:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):  # DDP rebuilds its buckets at the second step; the third is like all that follow
        counter = CollectiveCounter()
        with OperationDispatchMode(counter):
            model(torch.ones(2, 8, dtype=dtype)).sum().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
    dtypes: dict[str, list[str]] = defaultdict(list)
    for use in counter.by_dtype():
        dtypes[use.operation].append(use.dtype)
    return {"counts": counter.counts, "dtypes": {name: sorted(kinds) for name, kinds in dtypes.items()}}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    sharded = layer(torch.float32)
    fully_shard(sharded, mesh=mesh)
    result = {
        "ddp float32": counted(DistributedDataParallel(layer(torch.float32)), torch.float32),
        "ddp bfloat16": counted(DistributedDataParallel(layer(torch.bfloat16)), torch.bfloat16),
        "fsdp1": counted(
            FullyShardedDataParallel(layer(torch.float32), device_id=torch.device("cpu"), use_orig_params=True), torch.float32
        ),
        "fsdp2": counted(sharded, torch.float32, clip=True),
    }
    (Path(out) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
