"""A GAN in plain torch, both networks clipped."""

import argparse

import torch
from checksums import print_checksums
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--clip-late", action="store_true", help="clip the generator's gradients after its step")
parser.add_argument("--swap", action="store_true", help="both optimizers get the discriminator")
args = parser.parse_args()

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam((discriminator if args.swap else generator).parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
losses = []
for _ in range(24):
    real = torch.randn(8, 16) + 1.0
    fake = generator(torch.randn(8, 8))
    loss_d = nn.functional.softplus(discriminator(fake.detach())) + nn.functional.softplus(-discriminator(real))
    opt_d.zero_grad()
    loss_d.mean().backward()
    clip_grad_norm_(discriminator.parameters(), 0.5)
    opt_d.step()

    loss_g = nn.functional.softplus(-discriminator(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    if not args.clip_late:
        clip_grad_norm_(generator.parameters(), 0.01)
    opt_g.step()
    if args.clip_late:
        clip_grad_norm_(generator.parameters(), 0.01)
    losses += [loss_d.mean().item(), loss_g.item()]
print_checksums([*generator.parameters(), *discriminator.parameters()], losses)
