"""A LightningModule trained by Trainer.fit with gradient clipping and a schedule."""

import argparse
import copy

import lightning as L
import torch
from checksums import print_checksums
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="32")
parser.add_argument("--optimizer-over-copy", action="store_true", help="configure the optimizer over a copy of the network")
args = parser.parse_args()


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 4))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x.to(self.net[0].weight.dtype)).float(), y.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        net = copy.deepcopy(self.net) if args.optimizer_over_copy else self.net
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(0)
model = Regression()
loader = DataLoader(TensorDataset(torch.randn(96, 16), torch.randn(96, 4)), batch_size=4, shuffle=True)
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(max_epochs=1, accelerator="cpu", precision=args.precision, gradient_clip_val=1.0, **options)
trainer.fit(model, loader)
print_checksums(model.parameters(), model.losses)
