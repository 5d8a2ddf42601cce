"""DeepSpeed's CIFAR example on a regression: deepspeed --num_gpus 2 deepspeed_train.py --deepspeed_config ds_zero2.json."""

import argparse

import deepspeed
import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--load-weights-late", action="store_true", help="load pretrained weights after initialize")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
deepspeed.init_distributed("gloo")
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
pretrained = {name: value + 0.1 * torch.randn_like(value) for name, value in model.state_dict().items()}
if not args.load_weights_late:
    model.load_state_dict(pretrained)
engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
if args.load_weights_late:
    engine.module.load_state_dict(pretrained)
torch.manual_seed(1 + engine.global_rank)
dtype = next(engine.module.parameters()).dtype
losses = []
for _ in range(22):
    x = torch.randn(4, 16)
    loss = engine(x.to(dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
if engine.global_rank == 0:
    print_checksums(engine.module.parameters(), losses)
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
