"""Tokenization of texts, and the prompt of a sample."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from benchbox.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import BatchSpec

PAD, BOS, EOS = 0, 1, 2
EOS_MARK = "<eos>"  # in templates, whatever a tokenizer calls its token
FIRST_BYTE = 3
VOCABULARY = FIRST_BYTE + 256
MAX_CACHED_TEXTS = 4096  # about a KiB each


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


def state_bins(state: np.ndarray, bins: int, lowest: int = -1) -> np.ndarray:
    """Return the bin numbers of a normalised state (D,): equal bins over [-1, 1], the last one also for values above.

    Values below -1 have the number `lowest`: -1 as in openpi and LeRobot, on whose prompts the published weights were trained,
    or 0, the first bin, as in OpenTau.
    """
    # Compared with the lower edges: adding 1 would round a number just below 0 to the bin above it.
    edges = np.arange(bins) * (2 / bins) - 1
    return np.maximum(np.searchsorted(edges, state, side="right") - 1, lowest)


def encode_cues(spec: BatchSpec, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Encode the fixed texts of a spec as fields of the batch table."""
    return {f"{name}_cue_tokens": torch.tensor(tokenizer.encode(text)) for name, text in spec.cues.items()}


def encode_prompt(
    tokenizer: Tokenizer, spec: BatchSpec, task: str, state: Sequence[int] | np.ndarray | None, memory: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the tokens (P,) int64 of the task and, if given, of the binned state (D,), and their mask.

    The text is the spec's `prompt_template`. Without one it is that of openpi: `task\n` as in pi0 if there are neither a state
    nor fixed texts, otherwise as in pi05 `Task: task, State: 12 255;\n`, or `Task: task\n` without the state, and the spec's
    `prompt_end`. If the text is too long, the end of the task is cut: cutting the end of the text would remove the state, which
    changes in every frame. Of a past memory as many tokens are written as the policy may generate.

    Raises:
        ConfigurationError: `prompt_tokens` is too small even for an empty task.
    """
    ids = whole_prompt(tokenizer, spec, task, state, memory)
    if len(ids) > spec.prompt_tokens:
        prefix_ids, suffix_ids = prompt_without_task(tokenizer, spec, state, memory)
        task_tokens = spec.prompt_tokens - len(prefix_ids) - len(suffix_ids)
        if task_tokens < 0:
            raise ConfigurationError(
                f"prompt_tokens is {spec.prompt_tokens}, and the prompt takes "
                f"{len(prefix_ids) + len(suffix_ids)} without its task"
            )
        ids = prefix_ids + tokenizer.encode(clean_task(task))[:task_tokens] + suffix_ids
    return pad_tokens(ids, spec.prompt_tokens, tokenizer.pad)


def clean_task(task: str) -> str:
    """Return a task as prompts have it: without spaces around it, underscores and line breaks."""
    return task.strip().replace("_", " ").replace("\n", " ")


def whole_prompt(
    tokenizer: Tokenizer, spec: BatchSpec, task: str, state: Sequence[int] | np.ndarray | None, memory: str = ""
) -> list[int]:
    """Return the token ids of a prompt before its task is cut. See `encode_prompt`."""
    template, values = _prompt_parts(tokenizer, spec, state, memory)
    return _begin(tokenizer) + _encode_template(tokenizer, template, {**values, "task": clean_task(task)})


def prompt_without_task(
    tokenizer: Tokenizer, spec: BatchSpec, state: Sequence[int] | np.ndarray | None, memory: str = ""
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt before and after its task."""
    template, values = _prompt_parts(tokenizer, spec, state, memory)
    before, after = template.split("{task}")
    return _begin(tokenizer) + _encode_template(tokenizer, before, values), _encode_template(tokenizer, after, values)


def longest_bin(tokenizer: Tokenizer, spec: BatchSpec) -> int:
    """Return the bin number of a state value that takes most tokens in a prompt."""
    return max(range(spec.lowest_bin, spec.state_bins), key=lambda number: len(tokenizer.encode(f" {number}")))


def _prompt_parts(
    tokenizer: Tokenizer, spec: BatchSpec, state: Sequence[int] | np.ndarray | None, memory: str
) -> tuple[str, dict[str, str]]:
    """Return the template of a prompt, and its values but for the task."""
    memory_ids = tokenizer.encode(memory)
    if len(memory_ids) > spec.memory_tokens:
        memory = tokenizer.decode(memory_ids[: spec.memory_tokens])
    template = spec.prompt_template or _openpi_template(spec, has_state=state is not None)
    return template, {"state": "" if state is None else " ".join(map(str, state)), "memory": memory}


def _begin(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.bos is None else [tokenizer.bos]


def _openpi_template(spec: BatchSpec, *, has_state: bool) -> str:
    if has_state:
        return "Task: {task}, State: {state};\n" + spec.prompt_end
    return ("Task: {task}\n" if spec.cues or spec.prompt_end else "{task}\n") + spec.prompt_end


def _encode_template(tokenizer: Tokenizer, template: str, values: Mapping[str, str]) -> list[int]:
    """Return the token ids of a template with its `values`, in which `<eos>` stands for that token, if there is one."""
    texts = [tokenizer.encode(piece.format(**values)) for piece in template.split(EOS_MARK)]
    ids = texts[0]
    for text in texts[1:]:
        ids = [*ids, *([] if tokenizer.eos is None else [tokenizer.eos]), *text]
    return ids


def encode_target(
    tokenizer: Tokenizer, text: str, length: int, template: str = "{text}" + EOS_MARK
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (length,) int64 of a text that a policy learns to generate or reads, and their mask.

    Tokens beyond `length` are cut off. An empty text is masked completely, without the words of the template.
    """
    return pad_tokens(whole_target(tokenizer, text, template), length, tokenizer.pad)


def whole_target(tokenizer: Tokenizer, text: str, template: str = "{text}" + EOS_MARK) -> list[int]:
    """Return the token ids of `encode_target`, however many they are."""
    return _encode_template(tokenizer, template, {"text": text}) if text else []


def encode_target_end(tokenizer: Tokenizer, template: str) -> list[int]:
    """Return the token ids of what follows the text in a template of `encode_target`."""
    return _encode_template(tokenizer, template.split("{text}")[1], {})


class CachedEncoder:
    """Encoder of texts, `encode(*arguments)`, that keeps its most recent results: texts recur from frame to frame."""

    def __init__(self, encode: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
        self._encode = encode
        self._recent: OrderedDict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __call__(self, *arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask, which must not be changed."""
        encoded = self._recent.get(arguments)
        if encoded is None:
            encoded = self._recent[arguments] = self._encode(*arguments)
            if len(self._recent) > MAX_CACHED_TEXTS:
                self._recent.popitem(last=False)
        return encoded


def pad_tokens(ids: Sequence[int], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (length,) int64, the ids followed by `pad`, and the mask of the ids. Ids beyond `length` are cut off."""
    ids = ids[:length]
    tokens = np.full(length, pad, dtype=np.int64)
    tokens[: len(ids)] = ids
    mask = np.zeros(length, dtype=bool)
    mask[: len(ids)] = True
    return tokens, mask
