"""Megatron-LM#1359: main parameters are saved in float32 and come back as bfloat16.

The loader allocates what it reads into after the model, whose parameters are bfloat16, and the optimizer then takes its
float32 main parameters from there.
Repair: allocate in the dtype that was saved.
"""

import torch

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP501",)
RANKS = 1


def train(policy: Policy, optimizer: Masters, steps: int) -> None:
    for batch in batches(steps, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_state_dict(optimizer: Masters, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Empty tensors for the loader to fill."""
    return {
        f"main_param.{index}": torch.empty_like(main, dtype=dtype, requires_grad=False)
        for index, main in enumerate(optimizer.masters)
    }


def earlier(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    train(policy, optimizer, 6)
    main_params = {f"main_param.{index}": main.detach() for index, main in enumerate(optimizer.masters)}
    torch.save({"main": main_params, "optimizer": optimizer.state_dict()}, "checkpoint.pt")


def main(repaired: bool) -> None:
    saved = torch.load("checkpoint.pt")
    policy = Policy().to(torch.bfloat16)
    optimizer = Masters(policy.parameters(), lr=1e-3)
    loaded = sharded_state_dict(optimizer, torch.float32 if repaired else torch.bfloat16)
    for name, tensor in loaded.items():
        tensor.copy_(saved["main"][name])
    optimizer.load_state_dict(saved["optimizer"])
    for main_param, tensor in zip(optimizer.masters, loaded.values(), strict=True):
        main_param.data.copy_(tensor)
    optimizer.round_into_live()
    train(policy, optimizer, 8)
