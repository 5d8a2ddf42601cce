"""A tiny GPT-2 trained by transformers' Trainer, configured as run_clm.py is."""

import argparse

import torch
from checksums import print_checksums
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to(getattr(torch, args.dtype))
tokens = torch.randint(0, 64, (100, 12))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
trainer = Trainer(
    model=model,
    train_dataset=dataset,
    args=TrainingArguments(
        output_dir="out",
        use_cpu=True,
        bf16=args.bf16,
        optim=args.optim,
        learning_rate=1e-4,
        warmup_steps=4,
        max_steps=22,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=1,
    ),
)
trainer.train()
print_checksums(model.parameters(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
