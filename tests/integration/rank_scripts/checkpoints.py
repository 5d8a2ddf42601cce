"""Trains tiny models under every sharding library and saves them with it, good and broken, in one process group.

`python -m torch.distributed.run --nproc_per_node 2 rank_scripts/checkpoints.py FOLDER`
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from benchbox.backends.accelerators import fsdp_accelerator
from benchbox.backends.extension import build_extension
from benchbox.observer.introspect.tensors import local_shard

STEPS = 3


def model() -> nn.Module:
    """Two weights of different shapes, so that partitions end in the middle of one; a buffer."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    layers.register_buffer("inv_freq", torch.rand(4))
    return layers


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(dtype)


def round_to_bfloat16_(tensor: torch.Tensor) -> None:
    """Round a tensor to bfloat16 in place, in its dtype."""
    shard = local_shard(tensor).detach()
    shard.copy_(shard.bfloat16())


def zero(folder: Path, stage: int, *, pure: bool = False) -> None:
    layers = model()
    weights, biases = ([p for p in layers.parameters() if p.ndim == dimensions] for dimensions in (2, 1))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": pure, "bf16_optimizer_states": pure},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=layers, optimizer=torch.optim.AdamW(groups, lr=1e-3), config=config)
    for step in range(STEPS):
        engine.backward(engine(batch(step, torch.bfloat16)).float().square().mean())
        engine.step()
    if pure:
        engine.save_checkpoint(str(folder / f"zero{stage}-pure"))
        return
    engine.save_checkpoint(str(folder / f"zero{stage}"))
    masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    originals = [(tensor, tensor.detach().clone()) for tensor in masters]
    for tensor in masters:
        round_to_bfloat16_(tensor)
    engine.save_checkpoint(str(folder / f"zero{stage}-rederived"))
    with torch.no_grad():
        for tensor, original in originals:
            tensor.copy_(original)
    if stage < 3:
        with torch.no_grad():
            next(iter(engine.module.parameters()))[0] += 1.0  # the first row of 0.weight
        engine.save_checkpoint(str(folder / f"zero{stage}-stale"))
    for state in optimizer.optimizer.state.values():
        round_to_bfloat16_(state["exp_avg_sq"])
    engine.save_checkpoint(str(folder / f"zero{stage}-moments"))


def unpartitioned(folder: Path) -> None:
    """Save without ZeRO, with masters and without, and convert a checkpoint of ZeRO-1 to a universal one."""
    for name, config in (("zero0", {}), ("zero0-masters", {"bf16": {"enabled": True}})):
        layers = model()
        config |= {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 0}, "steps_per_print": 2**31}
        config |= {"zero_allow_untested_optimizer": True}
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=layers, optimizer=optimizer, config=config)
        for step in range(STEPS):
            engine.backward(engine(batch(step, next(layers.parameters()).dtype)).float().square().mean())
            engine.step()
        engine.save_checkpoint(str(folder / name))
    if dist.get_rank() == 0:
        (saved,) = folder.glob("zero1/global_step*")
        paths = ["--input_folder", str(saved), "--output_folder", str(folder / "universal")]
        options = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *paths, *options]
        subprocess.run(converter, check=True, capture_output=True)


def pipeline(folder: Path) -> None:
    """Save a pipeline of two stages."""
    torch.manual_seed(0)
    layers = PipelineModule(
        [nn.Linear(16, 16), nn.Linear(16, 8)], num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform"
    )
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True, "steps_per_print": 2**31}
    engine, *_ = deepspeed.initialize(model=layers, optimizer=optimizer, config=config)
    for step in range(STEPS):
        engine.train_batch(iter([(batch(step, torch.bfloat16), batch(step, torch.bfloat16)[:, :8])]))
    engine.save_checkpoint(str(folder / "pipeline"))


class Headed(nn.Module):
    """A trunk that is trained, a frozen layer, an output tied to the trunk, and a head that no optimizer gets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.frozen, self.tied, self.head = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.frozen.requires_grad_(requires_grad=False)
        self.tied.weight = self.trunk.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(self.frozen(self.trunk(inputs))))


def headed(folder: Path) -> None:
    """Save a ZeRO-2 checkpoint of a model whose head is in no optimizer, and one of the same model with it."""
    for name in ("zero2-no-head", "zero2-head"):
        layers = Headed()
        trained = [layers.trunk.weight, *([layers.head.weight] if name == "zero2-head" else [])]
        config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
        config |= {"zero_allow_untested_optimizer": True, "steps_per_print": 2**31}
        engine, *_ = deepspeed.initialize(model=layers, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)
        for step in range(STEPS):
            engine.backward(engine(batch(step, torch.bfloat16)).float().square().mean())
            engine.step()
        engine.save_checkpoint(str(folder / name))


def sharded(version: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = model().to(dtype)
    if version == 1:
        layers = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in (*layers.children(), layers):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    for step in range(STEPS):
        layers(batch(step, dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers, optimizer


def fsdp(folder: Path, version: int) -> None:
    layers, optimizer = sharded(version)
    save(folder / f"fsdp{version}", layers, optimizer)
    if version == 2:
        save(folder / "fsdp2-flat", layers, optimizer, flat=True)
        weights, state = get_state_dict(layers, optimizer)
        copies = {name: weight.bfloat16() for name, weight in weights.items()}
        dcp.save({"model": copies, "optimizer": state}, checkpoint_id=str(folder / "fsdp2-copies"))
        torch.save(
            {"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"fsdp2-rank{dist.get_rank()}.pt"
        )
    for state in optimizer.state.values():
        round_to_bfloat16_(state["exp_avg_sq"])
    for parameter in layers.parameters():
        round_to_bfloat16_(parameter)
    save(folder / f"fsdp{version}-rounded", layers, optimizer)
    save(folder / f"fsdp{version}-pure", *sharded(version, torch.bfloat16))


def save(folder: Path, layers: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool = False) -> None:
    weights, state = get_state_dict(layers, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({**weights, **state} if flat else {"model": weights, "optimizer": state}, checkpoint_id=str(folder))


def accelerate(folder: Path) -> None:
    """Save as `save_state` does under FSDP2: sharded into folders, and without DCP into a file for each rank."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, state_dict_type="sharded_state_dict", auto_wrap_policy="no_wrap"
    )
    accelerator = fsdp_accelerator(plugin)
    layers = model()
    layers, optimizer = accelerator.prepare(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
    for step in range(STEPS):
        accelerator.backward(layers(batch(step, torch.float32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "accelerate"))
    by_rank = folder / "accelerate-by-rank"
    save_fsdp_model(plugin, accelerator, layers, str(by_rank), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, layers, str(by_rank), use_dcp=False)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    build_extension()
    for stage in (1, 2, 3):
        zero(folder, stage)
    zero(folder, 2, pure=True)
    unpartitioned(folder)
    headed(folder)
    for version in (1, 2):
        fsdp(folder, version)
    accelerate(folder)
    pipeline(folder)  # last: no other engine of DeepSpeed can be built after it
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
