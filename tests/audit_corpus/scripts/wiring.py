"""Fine-tuning of a pretrained backbone with a new head."""

import argparse

import torch
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer-first", action="store_true", help="build the optimizer before the model is built again")
parser.add_argument("--forget-head", action="store_true", help="give the optimizer the backbone alone")
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


torch.manual_seed(0)
model = Net()
if args.optimizer_first:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pretrained = model.state_dict()
    model = Net()
    model.load_state_dict(pretrained)
elif args.forget_head:
    optimizer = torch.optim.AdamW(model.backbone.parameters(), lr=1e-3)
else:
    model.backbone[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
losses = []
for _ in range(24):
    x = torch.randn(8, 16)
    loss = (model(x) - x[:, :4]).square().mean()
    model.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
torch.save(model.state_dict(), "model.pt")
print_checksums(model.parameters(), losses)
