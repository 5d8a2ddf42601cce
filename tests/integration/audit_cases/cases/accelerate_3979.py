"""accelerate#3979: FSDP2's upcast to float32 is a warning and nothing else.

The loop over parameters binds a new tensor to its own variable (`param = param.to(torch.float32)`); the model keeps its
bfloat16 parameters, which are sharded and stepped as they are. Convergence was 28 times slower.
Repair: upcast the parameters the model holds, before they are sharded.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP101", "BXP604")
ALSO = ("BXP102", "BXP103", "BXP201")
RANKS = 2
CONTRACT = {"source": "mixed_precision=bf16: float32 masters", "stepped": "float32", "moments": "float32"}


def upcast(policy: Policy, repaired: bool) -> None:
    for parameter in policy.parameters():
        if repaired:
            parameter.data = parameter.data.to(torch.float32)
        else:
            parameter = parameter.to(torch.float32)


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy().to(torch.bfloat16)
    upcast(policy, repaired)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(policy, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2.5e-5, weight_decay=0.0)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
