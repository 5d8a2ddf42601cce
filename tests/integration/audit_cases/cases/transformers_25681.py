"""transformers#25681: casting a model to bfloat16 casts its rotary frequencies, and the angles of far positions with them.

The frequencies are a buffer, made in float32; `.to(bfloat16)` rounds them like any other tensor, and the tables that are
computed from them are off from then on.
Repair: cast parameters, and leave that buffer alone.
"""

import torch
from torch import Tensor, nn

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP602",)
RANKS = 1


class RotaryPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 16, 2) / 16), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        angles = torch.arange(observation.shape[0])[:, None] * self.inv_freq.float()  # (B, C/2)
        even, odd = observation.float().chunk(2, dim=-1)
        turned = torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], dim=-1)
        return self.policy(turned.to(observation.dtype))


def main(repaired: bool) -> None:
    policy = RotaryPolicy()
    if repaired:
        for parameter in policy.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    else:
        policy.to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
