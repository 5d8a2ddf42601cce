"""Data workers of every start method: loaders.py spawn."""

import argparse

import torch
from checksums import print_checksums
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 88

    def __getitem__(self, index):
        return torch.randn(16)  # drawn in the worker


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("start_method")
    parser.add_argument("--half-weights", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 16))
    if args.half_weights:
        model.bfloat16()
    dtype = model[0].weight.dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Noise(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context=args.start_method)
    losses = []
    for x in loader:
        loss = (model(x.to(dtype)).float() - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print_checksums(model.parameters(), losses)
