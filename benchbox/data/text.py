"""Text into tokens, and the prompt a sample is told."""

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
    """Text to ids and back. `bos` and `eos` are the ids that begin and end a text, where there are such; `pad` fills up."""

    pad: int
    bos: int | None
    eos: int | None

    def encode(self, text: str) -> list[int]:
        """Token ids, without begin and end."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text; pad, begin and end are left out."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token: ids 3 to 258, after pad 0, begin 1 and end 2. Needs no files.

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
        """Token ids, without begin and end."""
        return [byte + FIRST_BYTE for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; pad, begin and end are left out, a character cut in two is replaced."""
        return bytes(i - FIRST_BYTE for i in ids if i >= FIRST_BYTE).decode(errors="replace")


def state_bins(state: np.ndarray, bins: int) -> np.ndarray:
    """Normalised state (D,) to bin numbers: [-1, 1] in equal parts, everything outside in the first and last."""
    return np.clip(np.floor((state + 1) / 2 * bins), 0, bins - 1).astype(np.int64)


def cues(spec: BatchSpec, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """The fixed texts of a spec, as the batch table has them."""
    return {f"{name}_cue_tokens": torch.tensor(tokenizer.encode(text)) for name, text in spec.cues.items()}


def prompt(tokenizer: Tokenizer, spec: BatchSpec, task: str, state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    r"""Tokens (P,) int64 and their mask: what to do, and the binned state (D,) as text where there is one.

    The words are those of openpi. A task that neither the state nor a cue follows stands alone, as pi0 reads it: `task\n`.
    Otherwise its parts are named, as pi05 reads them: `Task: task, State: 12 255;\n`, or `Task: task\n` without the state;
    "Action: " is not in it, since that is the policy's cue. Where the text is too long the task gives way, from its end:
    cutting the whole would cut the state, which changes every frame.

    Raises:
        ConfigurationError: not even the state fits.
    """
    clean = " ".join(task.replace("_", " ").split())
    beginning = "" if state is None and not spec.cues else "Task: "
    ending = "\n" if state is None else f", State: {' '.join(map(str, state))};\n"
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    ids = bos + tokenizer.encode(beginning + clean + ending)
    if len(ids) > spec.prompt_tokens:
        head, tail = bos + tokenizer.encode(beginning), tokenizer.encode(ending)
        room = spec.prompt_tokens - len(head) - len(tail)
        if room < 0:
            raise ConfigurationError(
                f"prompt_tokens is {spec.prompt_tokens}, and the prompt takes {len(head) + len(tail)} without its task"
            )
        ids = head + tokenizer.encode(clean)[:room] + tail
    return padded(ids, spec.prompt_tokens, tokenizer.pad)


def said(tokenizer: Tokenizer, text: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (length,) int64 of a text that a policy learns to say, its end with it, and their mask; all masked where it is
    empty. What does not fit is cut off.
    """
    eos = [] if tokenizer.eos is None else [tokenizer.eos]
    return padded(tokenizer.encode(text) + eos if text else [], length, tokenizer.pad)


def padded(ids: Sequence[int], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """(length,) int64 with `pad` after the ids, and the mask of the ids. Ids beyond `length` are cut off."""
    kept = list(ids[:length])
    tokens = np.full(length, pad, dtype=np.int64)
    tokens[: len(kept)] = kept
    return tokens, np.arange(length) < len(kept)
