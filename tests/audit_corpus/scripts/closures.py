"""Optimizers that evaluate the model themselves: LBFGS, and SAM as its users copy it."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=["lbfgs", "sam"])
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: climbs to the worst point nearby, and steps with the gradient found there."""

    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        gradients = [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for _, gradient in gradients]).norm() + 1e-12
        before = [p.clone() for p, _ in gradients]
        for p, gradient in gradients:
            p.add_(gradient * (self.param_groups[0]["rho"] / norm))
        loss = closure()
        for (p, _), value in zip(gradients, before, strict=True):
            p.copy_(value)
        self.base.step()
        return loss


torch.manual_seed(0)
dtype = getattr(torch, args.dtype)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(dtype)
optimizers = {
    "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5),
    "sam": lambda: SAM(model.parameters(), torch.optim.AdamW, lr=1e-3),
}
optimizer = optimizers[args.name]()
losses = []
for _ in range(22):
    x = torch.randn(8, 16, dtype=dtype)

    def closure(x=x):
        optimizer.zero_grad()
        loss = (model(x).float() - x[:, :4].float()).square().mean()
        loss.backward()
        return loss

    if args.name == "sam":
        closure()
    losses.append(optimizer.step(closure).item())
print_checksums(model.parameters(), losses)
