"""Lightning's GAN example: manual optimization of two optimizers."""

import lightning as L
import torch
from checksums import print_checksums
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8))
        self.toggle_optimizer(opt_g)
        loss_g = nn.functional.softplus(-self.discriminator(fake)).mean()
        self.manual_backward(loss_g)
        self.clip_gradients(opt_g, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        loss_d = nn.functional.softplus(self.discriminator(fake.detach())) + nn.functional.softplus(-self.discriminator(real))
        self.manual_backward(loss_d.mean())
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)
        self.losses += [loss_g.item(), loss_d.mean().item()]

    def configure_optimizers(self):
        options = {"lr": 2e-4, "betas": (0.5, 0.999)}
        networks = (self.generator, self.discriminator)
        return [torch.optim.Adam(network.parameters(), **options) for network in networks], []


L.seed_everything(0)
model = GAN()
loader = DataLoader(TensorDataset(torch.randn(96, 16)), batch_size=4, shuffle=True)
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
L.Trainer(max_epochs=1, accelerator="cpu", **options).fit(model, loader)
print_checksums(model.parameters(), model.losses)
