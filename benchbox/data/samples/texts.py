"""Texts of a dataset's frames as tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.dataset.lerobot import RESPONSE, LeRobotDataset
from benchbox.data.format.metadata import STATE
from benchbox.data.order.spacing import evenly_distributed
from benchbox.data.text.prompt import (
    ByteTokenizer,
    CachedEncoder,
    clean_task,
    encode_cues,
    encode_prompt,
    encode_target,
    longest_bin,
    pad_tokens,
    prompt_without_task,
    whole_prompt,
    whole_target,
)
from benchbox.data.text.tokenizer import open_tokenizer
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchbox.data.text.prompt import Tokenizer
    from benchbox.registry.contracts import BatchSpec

METADATA = "metadata."  # prefix of text features that describe the episode
MEMORY = "memory"
_SHOWN_LETTERS = 60  # of a task, in messages
_MORE_TOKENS = "choose a policy or size with more prompt_tokens"
# Frames in which texts are looked at before a training: a large dataset has them in thousands of files.
_LOOKED_AT_EPISODES, _LOOKED_AT_FRAMES = 64, 16  # of the dataset, and of each of these


class FrameTexts:
    """Encoder of the texts of a dataset that a policy reads or learns to generate.

    Args:
        tokenizer: a `tokenizer.json`; without one every byte is a token.

    Raises:
        ConfigurationError: the tokenizer does not fit the policy's text vocabulary.
    """

    def __init__(self, dataset: LeRobotDataset, spec: BatchSpec, tokenizer: Path | None) -> None:
        self._dataset = dataset
        self._spec = spec
        self._tokenizer = open_tokenizer(tokenizer, spec.text_vocab)
        self.cues = encode_cues(spec, self._tokenizer)
        self._encode_prompt = CachedEncoder(partial(encode_prompt, self._tokenizer, spec))
        self._encode_target = CachedEncoder(partial(encode_target, self._tokenizer))
        fields = [name for name in dataset.texts if name.startswith(METADATA)]
        self._metadata_fields, self._unread_fields = fields[: spec.metadata[0]], fields[spec.metadata[0] :]

    def encode(self, start: int, bins: Sequence[tuple[int, ...] | None]) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
        """Return the tokens and mask of every text in the spec, for the frames from `start` on.

        Args:
            bins: bin numbers of the state of every frame, None without a state in the prompt.

        Raises:
            ConfigurationError: the prompt has no room for its task.
            DataError: the dataset is damaged.
        """
        spec, dataset, frames = self._spec, self._dataset, range(start, start + len(bins))
        texts = {}
        if spec.prompt_tokens:
            texts["prompt"] = [
                self._encode_prompt(dataset.task(frame), state, self._past_memory(frame))
                for frame, state in zip(frames, bins, strict=True)
            ]
        if spec.response_tokens:
            length, template = spec.response_tokens, spec.response_template
            texts[RESPONSE] = [self._encode_target(dataset.text(RESPONSE, frame), length, template) for frame in frames]
        if spec.memory_tokens:
            texts[MEMORY] = [self._encode_target(dataset.text(MEMORY, frame), spec.memory_tokens) for frame in frames]
        if all(spec.metadata):
            texts["metadata"] = [self._encode_metadata(frame) for frame in frames]
        return texts

    def describe_long_prompts(self) -> str | None:
        """Return a line on prompts that do not fit whole, with the remedy; None if all do, or none is read.

        They are prompts with the longest state and memory that a frame may have.
        """
        spec, tokenizer, tasks = self._spec, self._tokenizer, self._dataset.tasks
        if not spec.prompt_tokens:
            return None
        inputs = self._find_longest_inputs()
        sizes, may_be = _describe_inputs(spec, *inputs), any(inputs)
        room = spec.prompt_tokens - sum(map(len, prompt_without_task(tokenizer, spec, *inputs)))
        if room < 0:
            return (
                f"prompt_tokens is {spec.prompt_tokens}, and a prompt takes up to {spec.prompt_tokens - room} without its task"
                f"{sizes}: a frame whose prompt takes more ends the training; {self._tokenizer_hint}{_MORE_TOKENS}"
            )
        lengths = {task: len(whole_prompt(tokenizer, spec, task, *inputs)) for task in tasks}
        cut = [task for task, length in lengths.items() if length > spec.prompt_tokens]
        if not cut:
            return None
        longest = max(cut, key=lengths.__getitem__)
        line = (
            f"prompt_tokens is {spec.prompt_tokens}, and the ends of {len(cut)} of {len(tasks)} tasks "
            f"{'may be' if may_be else 'are'} cut: the longest, {_shorten(longest)}, takes "
            f"{len(tokenizer.encode(clean_task(longest)))} tokens, and {room} are left{sizes}"
        )
        equal = self._find_equal_tasks(*inputs)
        if equal:
            first, second, *_ = equal[0]
            line += (
                f"; {sum(map(len, equal))} different tasks {'may ' if may_be else ''}have the same tokens as another one, "
                f"such as {_shorten(first)} and {_shorten(second)}"
            )
        return f"{line}; {self._tokenizer_hint}{_MORE_TOKENS}, or shorten the tasks"

    def describe_long_targets(self) -> list[str]:
        """Return lines on texts to learn and on metadata that do not fit whole, with the remedy; none if all do.

        They are texts of frames that are evenly distributed over the dataset.
        """
        spec, tokenizer = self._spec, self._tokenizer
        lines: list[str] = []
        targets = ((RESPONSE, spec.response_tokens, spec.response_template), (MEMORY, spec.memory_tokens))
        for name, length, *template in targets:
            if length and self._dataset.has_text(name):
                tokens = partial(_count_target, tokenizer, template)
                limit = f"{name}_tokens is {length}"
                lines += self._describe_cut_texts(name, tokens, length, limit, cut="cut, with what ends them")
        if not all(spec.metadata):
            return lines
        if self._unread_fields:
            lines.append(
                f"the policy reads {spec.metadata[0]} fields of metadata, and {', '.join(self._unread_fields)} "
                f"{'is' if len(self._unread_fields) == 1 else 'are'} left out; choose a policy or size that reads more"
            )
        for name in self._metadata_fields:
            tokens = partial(_count_metadata, tokenizer, name)
            limit = f"a field of metadata has {spec.metadata[1]} tokens"
            lines += self._describe_cut_texts(name, tokens, spec.metadata[1], limit, cut="cut")
        return lines

    def _describe_cut_texts(
        self, name: str, tokens: Callable[[str], int], length: int, limit: str, *, cut: str
    ) -> Iterator[str]:
        """Yield a line if texts of a feature have more tokens than `length`."""
        counts = {text: tokens(text) for text in self._look_at_texts(name)}
        too_long = [text for text, count in counts.items() if count > length]
        if too_long:
            longest = max(too_long, key=counts.__getitem__)
            yield (
                f"{limit}, and the ends of {len(too_long)} of {len(counts)} {name} texts are {cut}: the longest, "
                f"{_shorten(longest)}, takes {counts[longest]} tokens; {self._tokenizer_hint}choose a policy or size with more "
                "tokens for it, or shorten the texts"
            )

    def _look_at_texts(self, name: str) -> list[str]:
        """Return different texts of a feature, in frames that are evenly distributed. Frames that cannot be read have none."""
        texts: dict[str, None] = {}
        for number in evenly_distributed(len(self._dataset.episodes), _LOOKED_AT_EPISODES):
            episode = self._dataset.episodes[number]
            try:
                for frame in evenly_distributed(episode.length, _LOOKED_AT_FRAMES):
                    texts[self._dataset.text(name, episode.from_index + frame)] = None
            except DataError:  # which is reported where the frame is drawn: it may be in no sample
                continue
        return [text for text in texts if text]

    @property
    def _tokenizer_hint(self) -> str:
        """Remedy for long prompts where every byte is a token, an empty text elsewhere."""
        return "name a tokenizer with fewer tokens per word, " if isinstance(self._tokenizer, ByteTokenizer) else ""

    def _find_equal_tasks(self, state: list[int] | None, memory: str) -> list[list[str]]:
        """Return the groups of tasks that differ in words and have the same tokens, beside this state and memory."""
        groups: dict[bytes, dict[str, str]] = {}  # in which spellings of the same words are one task
        for task in self._dataset.tasks:
            tokens, _ = encode_prompt(self._tokenizer, self._spec, task, state, memory)
            groups.setdefault(tokens.tobytes(), {}).setdefault(clean_task(task), task)
        return [list(group.values()) for group in groups.values() if len(group) > 1]

    def _find_longest_inputs(self) -> tuple[list[int] | None, str]:
        """Return the state and the past memory that take most tokens in a prompt, None and an empty text without them."""
        spec, dataset = self._spec, self._dataset
        state = None
        if spec.state_in_prompt:
            state = [longest_bin(self._tokenizer, spec)] * int(np.prod(dataset.features[STATE]["shape"]))
        return state, "memory " * spec.memory_tokens if dataset.has_text(MEMORY) else ""

    def _past_memory(self, frame: int) -> str:
        """Return the memory of the frame before, which the policy remembers; at the start of an episode it is empty."""
        if not self._spec.memory_tokens or frame == self._dataset.episode_of(frame).from_index:
            return ""
        return self._dataset.text(MEMORY, frame - 1)

    def _encode_metadata(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens (K, L) int64 of the metadata, "field: text, " per row, and their mask."""
        rows, length = self._spec.metadata
        tokens = np.full((rows, length), self._tokenizer.pad, dtype=np.int64)
        mask = np.zeros((rows, length), dtype=bool)
        for row, name in enumerate(self._metadata_fields):
            if text := self._dataset.text(name, frame):
                ids = _encode_field(self._tokenizer, name, text)
                tokens[row], mask[row] = pad_tokens(ids, length, self._tokenizer.pad)
        return tokens, mask


def _encode_field(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    return tokenizer.encode(f"{name.removeprefix(METADATA)}: {text}, ")


def _count_target(tokenizer: Tokenizer, template: Sequence[str], text: str) -> int:
    return len(whole_target(tokenizer, text, *template))


def _count_metadata(tokenizer: Tokenizer, name: str, text: str) -> int:
    return len(_encode_field(tokenizer, name, text))


def _describe_inputs(spec: BatchSpec, state: list[int] | None, memory: str) -> str:
    """Return the sizes of what prompts have beside the task, in parentheses; an empty text if they have nothing."""
    sizes = [] if state is None else [f"a state of {len(state)} values"]
    if memory:
        sizes.append(f"a memory of {spec.memory_tokens} tokens")
    return f" ({' and '.join(sizes)})" if sizes else ""


def _shorten(task: str) -> str:
    """Return a task in quotation marks, without its middle if it is long: long tasks may differ only in their ends."""
    half = _SHOWN_LETTERS // 2
    return repr(task if len(task) <= _SHOWN_LETTERS else f"{task[:half]}...{task[-half:]}")
