"""FSDP2 as torchtitan applies it: every block sharded, bfloat16 compute, float32 reduction."""

import argparse
import time

import torch
import torch.distributed as dist
from checksums import print_checksums
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

parser = argparse.ArgumentParser()
parser.add_argument("--model-dtype", default="float32")
parser.add_argument("--optimizer-first", action="store_true", help="build the optimizer before the model is sharded")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
model = nn.Sequential(nn.Embedding(64, 32), *[Block(32) for _ in range(3)], nn.Linear(32, 64))
model.to(getattr(torch, args.model_dtype))
early = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95)) if args.optimizer_first else None
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = early or torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

torch.manual_seed(1 + dist.get_rank())
losses = []
for _ in range(22):
    tokens = torch.randint(0, 64, (4, 9))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weights = [parameter.full_tensor() for parameter in model.parameters()]
if dist.get_rank() == 0:
    print_checksums(weights, losses)
time.sleep(0.5)
dist.destroy_process_group()
