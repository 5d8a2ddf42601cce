"""Tokenization of texts, and the prompt of a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from benchbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

PAD, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256


class Tokenizer(Protocol):
    """Conversion between text and token ids. `bos` and `eos` are None if the tokenizer has no such token."""

    pad: int
    bos: int | None
    eos: int | None

    def encode(self, text: str) -> list[int]:
        """Return the token ids, without `bos` and `eos`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens."""


class ByteTokenizer:
    """Tokenizer that needs no files: every byte of the UTF-8 text is a token, 3 to 258, after pad 0, bos 1 and eos 2.

    Raises:
        ConfigurationError: the policy's text vocabulary is smaller than 259.
    """

    pad: int = PAD
    bos: int | None = BOS
    eos: int | None = EOS

    def __init__(self, text_vocab: int) -> None:
        if text_vocab < VOCABULARY:
            raise ConfigurationError(f"text_vocab is {text_vocab}, and the byte tokenizer has {VOCABULARY} tokens")

    def encode(self, text: str) -> list[int]:
        """Return the token ids, without `bos` and `eos`."""
        return [byte + FIRST_BYTE for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens. An incomplete character is replaced."""
        return bytes(i - FIRST_BYTE for i in ids if i >= FIRST_BYTE).decode(errors="replace")


def state_bins(state: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin numbers of a normalised state (D,): equal bins over [-1, 1], the last one also for values above.

    Values below -1 have the number -1, as in openpi and LeRobot, on whose prompts the published weights were trained.
    """
    return np.clip(np.floor((state + 1) / 2 * bins), -1, bins - 1).astype(np.int64)


def encode_cues(spec: BatchSpec, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Encode the fixed texts of a spec as fields of the batch table."""
    return {f"{name}_cue_tokens": torch.tensor(tokenizer.encode(text)) for name, text in spec.cues.items()}


def encode_prompt(tokenizer: Tokenizer, spec: BatchSpec, task: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the tokens (P,) int64 of the task and, if given, of the binned state (D,), and their mask.

    The text is that of openpi: `task\n` as in pi0 if there are neither a state nor fixed texts, otherwise as in pi05
    `Task: task, State: 12 255;\n`, or `Task: task\n` without the state, and the spec's `prompt_end`. If the text is too
    long, the end of the task is cut: cutting the end of the text would remove the state, which changes in every frame.

    Raises:
        ConfigurationError: `prompt_tokens` is too small even for an empty task.
    """
    task = task.strip().replace("_", " ").replace("\n", " ")
    prefix = "Task: " if spec.cues or spec.prompt_end or state is not None else ""
    suffix = ("\n" if state is None else f", State: {' '.join(map(str, state))};\n") + spec.prompt_end
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    ids = bos + tokenizer.encode(prefix + task + suffix)
    if len(ids) > spec.prompt_tokens:
        prefix_ids, suffix_ids = bos + tokenizer.encode(prefix), tokenizer.encode(suffix)
        task_tokens = spec.prompt_tokens - len(prefix_ids) - len(suffix_ids)
        if task_tokens < 0:
            raise ConfigurationError(
                f"prompt_tokens is {spec.prompt_tokens}, and the prompt takes "
                f"{len(prefix_ids) + len(suffix_ids)} without its task"
            )
        ids = prefix_ids + tokenizer.encode(task)[:task_tokens] + suffix_ids
    return pad_tokens(ids, spec.prompt_tokens, tokenizer.pad)


def encode_target(tokenizer: Tokenizer, text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (length,) int64 of a text that a policy learns to generate, with `eos`, and their mask.

    Tokens beyond `length` are cut off. An empty text is masked completely, without `eos`.
    """
    eos = [] if tokenizer.eos is None else [tokenizer.eos]
    return pad_tokens(tokenizer.encode(text) + eos if text else [], length, tokenizer.pad)


def pad_tokens(ids: Sequence[int], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (length,) int64, the ids followed by `pad`, and the mask of the ids. Ids beyond `length` are cut off."""
    ids = list(ids[:length])
    tokens = np.full(length, pad, dtype=np.int64)
    tokens[: len(ids)] = ids
    return tokens, np.arange(length) < len(ids)
