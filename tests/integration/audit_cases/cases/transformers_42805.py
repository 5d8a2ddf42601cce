"""transformers#42805: a model is loaded in the dtype of its checkpoint, bfloat16, and `Trainer` trains it as it is.

`bf16=True` turns autocast on and changes no parameter, so AdamW steps bfloat16 weights with bfloat16 moments.
Repair: `from_pretrained(..., dtype=torch.float32)`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.support.tiny_training import batches

RULES = ("BXP101",)
ALSO = ("BXP102", "BXP103", "BXP201")
RANKS = 1


def earlier(repaired: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model.to(torch.bfloat16).save_pretrained("pretrained")


def main(repaired: bool) -> None:
    model = LlamaForCausalLM.from_pretrained("pretrained", dtype=torch.float32 if repaired else "auto")
    tokens = [batch.abs().mul(8).long().clamp(max=31)[0] for batch in batches(8)]
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        bf16=True,
        max_steps=8,
        per_device_train_batch_size=1,
        learning_rate=5e-5,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=examples).train()
