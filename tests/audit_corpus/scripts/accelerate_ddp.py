"""accelerate's examples/by_feature/gradient_accumulation.py on a regression."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from checksums import print_checksums
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--forget-optimizer", action="store_true", help="do not pass the optimizer to prepare")
parser.add_argument("--mixed-precision", default="no")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=args.mixed_precision)
set_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
loader = DataLoader(TensorDataset(torch.randn(400, 16), torch.randn(400, 4)), batch_size=4, shuffle=True)
if args.forget_optimizer:
    model, loader = accelerator.prepare(model, loader)
else:
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

losses = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    print_checksums(model.parameters(), losses)
accelerator.wait_for_everyone()
accelerator.end_training()
