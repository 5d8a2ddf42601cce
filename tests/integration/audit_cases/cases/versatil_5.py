"""VersatIL#5: LoRA adapters are cast to bfloat16 with the model they adapt, and never leave their first values.

At a learning rate of 2.5e-5 nearly every update is rounded away: after 84,000 steps `lora_A` was still as it had been drawn,
and the policy scored 2 of 130.
Repair: trainable parameters in float32, the frozen ones as they were, and autocast around the forward pass.
"""

import torch
from torch import Tensor, nn

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP101", "BXP102")
SEVERITIES = {"BXP101": "warning"}  # of adapters
ALSO = ("BXP201",)
RANKS = 1


class Adapted(nn.Module):
    """A frozen linear layer and an update of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.lora_A = nn.Parameter(0.3 * torch.randn(rank, frozen.in_features))
        self.lora_B = nn.Parameter(0.3 * torch.randn(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)


def main(repaired: bool) -> None:
    policy = Policy().requires_grad_(False)
    policy.backbone, policy.head = Adapted(policy.backbone), Adapted(policy.head)
    policy.to(torch.bfloat16)
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    if repaired:
        for parameter in trainable:
            parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trainable, lr=2.5e-5, weight_decay=0.0)
    for batch in batches(8, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(policy, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
