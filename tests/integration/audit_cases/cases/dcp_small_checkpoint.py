"""FSDP2 with a distributed checkpoint that was made smaller: its moments are saved in bfloat16.

On resume they are read into float32 moments, so every dtype is right and every value is rounded.
Repair: save what is there.
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP502",)
RANKS = 2


def build() -> tuple[Policy, torch.optim.Optimizer]:
    join_ranks()
    policy = Policy()
    fully_shard(policy, mesh=init_device_mesh("cpu", (2,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-3)


def train(policy: Policy, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in batches(steps):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def earlier(repaired: bool) -> None:
    policy, optimizer = build()
    train(policy, optimizer, 12)
    if not repaired:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(torch.bfloat16)
    weights, moments = get_state_dict(policy, optimizer)
    dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id="checkpoint")


def main(repaired: bool) -> None:
    policy, optimizer = build()
    weights, moments = get_state_dict(policy, optimizer)
    dcp.load({"policy": weights, "optimizer": moments}, checkpoint_id="checkpoint")
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(policy, optimizer, 8)
