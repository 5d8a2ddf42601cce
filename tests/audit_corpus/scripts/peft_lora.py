"""LoRA adapters of a frozen bfloat16 GPT-2, as in PEFT's quick tour."""

import argparse

import torch
from checksums import print_checksums
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--no-autocast-adapters", action="store_true", help="create adapters in the dtype of the base model")
parser.add_argument("--learning-rate", type=float, default=2e-4)
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
base = GPT2LMHeadModel(config).to(torch.bfloat16)
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM", fan_in_fan_out=True)
model = get_peft_model(base, lora, autocast_adapter_dtype=not args.no_autocast_adapters)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
model.train()
losses = []
for _ in range(22):
    tokens = torch.randint(0, 64, (4, 12))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print_checksums([parameter for parameter in model.parameters() if parameter.requires_grad], losses)
