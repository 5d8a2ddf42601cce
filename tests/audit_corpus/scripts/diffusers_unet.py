"""diffusers' examples/unconditional_image_generation/train_unconditional.py on random images, with its EMA."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from checksums import print_checksums
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

parser = argparse.ArgumentParser()
parser.add_argument("--mixed-precision", default="no")
parser.add_argument("--cast-unet", action="store_true", help="cast the trained network to the dtype of mixed precision")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision, gradient_accumulation_steps=1)
set_seed(0)
blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
model = UNet2DModel(
    sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, **blocks
)
ema = EMAModel(model.parameters(), decay=0.9999, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
weight_dtype = {"no": torch.float32, "bf16": torch.bfloat16}[args.mixed_precision]
if args.cast_unet:
    model.to(dtype=weight_dtype)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=5, num_training_steps=22)
loader = torch.utils.data.DataLoader(torch.randn(88, 3, 8, 8), batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

losses = []
for images in loader:
    clean_images = images.to(weight_dtype)
    noise = torch.randn_like(clean_images)
    timesteps = torch.randint(0, 100, (len(images),))
    noisy = noise_scheduler.add_noise(clean_images, noise, timesteps)
    with accelerator.accumulate(model):
        prediction = model(noisy, timesteps).sample
        loss = F.mse_loss(prediction.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        ema.step(model.parameters())
    losses.append(loss.item())
print_checksums([*model.parameters(), *ema.shadow_params], losses)
accelerator.end_training()
