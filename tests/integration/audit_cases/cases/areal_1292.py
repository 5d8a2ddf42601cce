"""AReaL#1292: with FSDP2 and `actor.dtype: bfloat16` the loss ends three times as high as with DeepSpeed or Megatron.

AdamW's moments take the dtype of the parameters it is given, and the weights round every small update away.
Repair: hold parameters in float32 and let the mixed-precision policy cast them for the forward and backward pass.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.tiny_training import Policy, batches, join_ranks, loss_of

RULES = ("BXP101", "BXP201")
ALSO = ("BXP102", "BXP103", "BXP106")
RANKS = 2


def main(repaired: bool) -> None:
    join_ranks()
    policy = Policy().to(torch.float32 if repaired else torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (policy.backbone, policy.head, policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, weight_decay=0.01)
    for batch in batches(8):
        loss_of(policy, batch).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
