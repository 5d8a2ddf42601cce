"""Writes sharded checkpoints as DeepSpeed and FSDP do, on two ranks, one folder each: `sharded_checkpoints.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from benchbox.backends.extension import build_extension

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    build_extension()
    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        engine = zero(stage)
        engine.save_checkpoint(str(folder / f"zero{stage}"))
        if stage == 2:
            for master, live in zip(
                engine.optimizer.single_partition_of_fp32_groups, engine.optimizer.bit16_groups_flat, strict=True
            ):
                rank = dist.get_rank()
                master.data.copy_(live.detach()[rank * master.numel() : (rank + 1) * master.numel()])
            engine.save_checkpoint(str(folder / "zero2_derived"))
    for name, wrap in (("fsdp1", wrapped_by_fsdp1), ("fsdp2", wrapped_by_fsdp2)):
        model = wrap(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.25)
        for _ in range(STEPS):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / name))
    dist.barrier()
    dist.destroy_process_group()


def zero(stage: int) -> deepspeed.DeepSpeedEngine:
    model = network()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(4, 16, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    return engine


def wrapped_by_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def wrapped_by_fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
