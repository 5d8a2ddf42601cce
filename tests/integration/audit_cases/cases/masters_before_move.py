"""Masters are made before the policy is moved (REFERENCE P4, OpenTau#186), and stay behind on the CPU.

Every step then waits for gradients to come down and weights to go up. A machine without an accelerator has one other device,
`meta`, on which tensors have no values: there the masters get gradients of zero, and only where things are is true.
Repair: move the policy first.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP105",)
RANKS = 1


def main(repaired: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    policy = Policy().to(torch.bfloat16)
    if repaired:
        policy.to(device)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    policy.to(device)
    optimizer.live = list(policy.parameters())  # those that are moved to `meta` are new ones
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch.to(device)).backward()
        step_across(optimizer, device)
        optimizer.zero_grad()


def step_across(optimizer: Masters, device: torch.device) -> None:
    for parameter, master in zip(optimizer.live, optimizer.masters, strict=True):
        has_values = parameter.grad.device.type != "meta"
        master.grad = parameter.grad.to(master).float() if has_values else torch.zeros_like(master)
    optimizer.inner.step()
    with torch.no_grad():
        for parameter, master in zip(optimizer.live, optimizer.masters, strict=True):
            parameter.copy_(master.to(device))
