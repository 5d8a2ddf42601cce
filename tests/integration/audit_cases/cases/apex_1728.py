"""apex#1728: `FusedAdam(master_weights=True)` keeps no masters of bfloat16 parameters.

The option is honoured for float16 alone: the branch for bfloat16 was never written. The moments are float32, as they should
be, and every small update is lost in the weights.
Repair: masters for bfloat16 too.
"""

import torch

from tests.support.tiny_training import Policy, batches, loss_of

RULES = ("BXP604",)
ALSO = ("BXP101",)  # the arithmetic of the optimizer is unknown: lost updates are not judged
RANKS = 1
CONTRACT = {"source": "FusedAdam(master_weights=True)", "stepped": "float32", "moments": "float32"}


class FusedAdam(torch.optim.Optimizer):
    """Adam with float32 moments, and masters in the state where the parameter's dtype is one of those it keeps them for."""

    def __init__(self, params: object, lr: float, master_weights: bool, keeps_masters_of: set[torch.dtype]) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        self.dtypes = keeps_masters_of if master_weights else set()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                    if parameter.dtype in self.dtypes:
                        state["master_param"] = parameter.float()
                state["step"] += 1
                self.update(parameter, state, group)

    def update(self, parameter: torch.Tensor, state: dict, group: dict) -> None:
        beta1, beta2 = group["betas"]
        gradient = parameter.grad.float()
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** state["step"])
        scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        weight = state.get("master_param", parameter)
        weight.sub_(group["lr"] * mean / scale)
        parameter.copy_(weight)


def main(repaired: bool) -> None:
    policy = Policy().to(torch.bfloat16)
    dtypes = {torch.float16, torch.bfloat16} if repaired else {torch.float16}
    optimizer = FusedAdam(policy.parameters(), lr=2.5e-5, master_weights=True, keeps_masters_of=dtypes)
    for batch in batches(8, torch.bfloat16):
        loss_of(policy, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
