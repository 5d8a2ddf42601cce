"""lerobot's examples/training/train_policy.py with a policy that is cast to save memory."""

import argparse

import lerobot_train  # noqa: F401 (declares torchvision's operators)
import torch
from checksums import print_checksums
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(0)
config = ACTConfig(
    input_features={
        "observation.state": PolicyFeature(FeatureType.STATE, (4,)),
        "observation.environment_state": PolicyFeature(FeatureType.ENV, (6,)),
    },
    output_features={"action": PolicyFeature(FeatureType.ACTION, (4,))},
    dim_model=32,
    dim_feedforward=64,
    n_heads=2,
    n_encoder_layers=1,
    n_vae_encoder_layers=1,
    chunk_size=8,
    n_action_steps=8,
    device="cpu",
)
policy = ACTPolicy(config).to(dtype)
policy.train()
optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-4)
losses = []
for _ in range(22):
    batch = {
        "observation.state": torch.randn(2, 4, dtype=dtype),
        "observation.environment_state": torch.randn(2, 6, dtype=dtype),
        "action": torch.randn(2, 8, 4, dtype=dtype),
        "action_is_pad": torch.zeros(2, 8, dtype=torch.bool),
    }
    loss, _ = policy.forward(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print_checksums(policy.parameters(), losses)
