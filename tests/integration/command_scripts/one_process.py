"""Trains with dropout, data workers, a compiled model and a closure in one process. Prints every loss."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.randn(16)  # drawn in the worker


def train(name, model, optimizer, forward, batches, steps=8):
    for step, batch in zip(range(steps), batches, strict=False):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = (forward(batch) - batch).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure) if name == "closure" else closure()
        if name != "closure":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        print("result", name, step, loss.item().hex())
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("result", name, hashlib.sha256(state).hexdigest(), torch.rand(()).item().hex())


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(32), nn.Linear(32, 16))


def main():
    torch.manual_seed(0)
    model = net()
    loader = DataLoader(Noise(), batch_size=2, num_workers=2, shuffle=True)
    train("plain", model, torch.optim.AdamW(model.parameters(), lr=1e-3), model, loader)

    model = net()
    train("closure", model, torch.optim.LBFGS(model.parameters(), max_iter=2), model, [torch.randn(4, 16)] * 8)

    model = net()
    compiled = torch.compile(model, backend="aot_eager")  # the default one compiles C++ for half a minute
    train("compiled", model, torch.optim.AdamW(model.parameters()), compiled, [torch.randn(4, 16) for _ in range(8)])
