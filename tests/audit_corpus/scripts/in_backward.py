"""An optimizer for each parameter that steps during backward, as in torchtune's memory-efficient recipes."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
model = nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)
optimizers = {parameter: torch.optim.AdamW([parameter], lr=3e-4) for parameter in model.parameters()}


def step_in_backward(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step_in_backward)
losses = []
for _ in range(22):
    x = torch.randn(8, 32, dtype=dtype)
    loss = (model(x).float() - x[:, :4].float()).square().mean()
    loss.backward()
    losses.append(loss.item())
print_checksums(model.parameters(), losses)
