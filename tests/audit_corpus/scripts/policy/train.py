"""python -m policy.train: a frozen bfloat16 backbone, a float32 head, and a normaliser."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from policy.normalizer import Normalizer

sys.path.append(str(Path(__file__).parents[1]))
from checksums import print_checksums

parser = argparse.ArgumentParser()
parser.add_argument("--cast-all", action="store_true", help="cast the whole policy, not only the backbone")
args = parser.parse_args()

torch.manual_seed(0)
observations, actions = 40.0 * torch.randn(256, 16) + 200.0, torch.randn(256, 4)
policy = nn.ModuleDict(
    {
        "backbone": nn.Sequential(nn.Linear(16, 64), nn.GELU()).requires_grad_(False),
        "head": nn.Linear(64, 4),
        "normalizer": Normalizer(observations, actions),
    }
)
if args.cast_all:
    policy.bfloat16()
    policy["head"].float()
else:
    policy["backbone"].bfloat16()
optimizer = torch.optim.AdamW(policy["head"].parameters(), lr=1e-3)
losses = []
for step in range(24):
    rows = slice(8 * step, 8 * step + 8)
    normalizer = policy["normalizer"]
    features = policy["backbone"](normalizer.observation(observations[rows]).bfloat16())
    loss = (policy["head"](features.float()) - normalizer.action(actions[rows]).float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print_checksums(policy["head"].parameters(), losses)
