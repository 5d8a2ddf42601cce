"""Text of a sample: prompts, tokenizers, FAST tokens of actions."""
