"""FSDP2 through accelerate. On a CPU its state has to be told, because cpu=True drops the plugin."""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, set_seed
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--model-dtype", default="float32")
parser.add_argument("--mixed-precision", default="bf16")
args = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="no_wrap")
accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
if args.mixed_precision != "no":
    plugin.set_mixed_precision(args.mixed_precision)
PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = plugin
accelerator.state.device = torch.device("cpu")

set_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(getattr(torch, args.model_dtype))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(accelerator.process_index)
losses = []
for _ in range(22):
    x = torch.randn(4, 16, dtype=getattr(torch, args.model_dtype))
    loss = model(x).float().square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weights = [parameter.full_tensor() for parameter in model.parameters()]
if accelerator.is_main_process:
    print_checksums(weights, losses)
dist.barrier()
accelerator.end_training()
