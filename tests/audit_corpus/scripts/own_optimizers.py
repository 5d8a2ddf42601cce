"""Optimizers that people write themselves: Muon for matrices, and an AdamW that clips in its step."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("name", choices=["muon", "clipping"])
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()


class Muon(torch.optim.Optimizer):
    """Orthogonalises the momentum of each matrix by five Newton-Schulz iterations."""

    def __init__(self, parameters, lr=0.02, momentum=0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).float()
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x.to(p.dtype), alpha=-group["lr"])


class ClippingAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.1)
        return super().step(closure)


torch.manual_seed(0)
dtype = getattr(torch, args.dtype)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)).to(dtype)
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
if args.name == "muon":
    optimizers = [Muon(matrices, lr=5e-3), torch.optim.AdamW(vectors, lr=3e-4)]
else:
    optimizers = [ClippingAdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-4)]
losses = []
for _ in range(24):
    x = torch.randn(8, 16, dtype=dtype)
    loss = (model(x).float() - x.float()).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print_checksums(model.parameters(), losses)
