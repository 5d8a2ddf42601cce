"""DeepSpeed through accelerate: accelerate launch --use_deepspeed."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from checksums import print_checksums
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed-config", default="ds_zero2.json")
args = parser.parse_args()

config = json.loads(Path(args.deepspeed_config).read_text())
plugin = DeepSpeedPlugin(hf_ds_config={key: config[key] for key in config if key not in ("optimizer", "scheduler")})
accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
set_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(1 + accelerator.process_index)
losses = []
for _ in range(22):
    loss = model(torch.randn(4, 16, dtype=torch.bfloat16)).float().square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    print_checksums(model.parameters(), losses)
accelerator.wait_for_everyone()
accelerator.end_training()
