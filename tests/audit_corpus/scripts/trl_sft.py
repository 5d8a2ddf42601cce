"""TRL's SFTTrainer on a tiny GPT-2 and a tokenised dataset."""

import argparse

import torch
from checksums import print_checksums
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()

words = [f"w{number}" for number in range(60)]
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
dataset = Dataset.from_dict({"text": [" ".join(words[(7 * row + 3 * i) % 60] for i in range(10)) for row in range(100)]})
config = GPT2Config(vocab_size=len(vocabulary), n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
model = GPT2LMHeadModel(config).to(getattr(torch, args.dtype))
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        output_dir="out",
        use_cpu=True,
        bf16=args.bf16,
        learning_rate=1e-4,
        max_steps=22,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        report_to=[],
        seed=1,
    ),
)
trainer.train()
print_checksums(trainer.model.parameters(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
