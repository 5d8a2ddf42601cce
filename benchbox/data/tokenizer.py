"""Tokenizers out of files: those that the tokenizers library of Hugging Face writes, read from a local folder only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tokenizers

from benchbox.data.text import ByteTokenizer
from benchbox.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.data.text import Tokenizer

_USUAL = {  # names of special tokens, for a file that nothing beside it explains
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
}


def open_tokenizer(path: Path | None, text_vocab: int) -> Tokenizer:
    """The tokenizer in that file, or that of bytes where there is none.

    Raises:
        ConfigurationError: it has ids that the policy's text vocabulary does not.
        DataError: the file is missing or damaged.
    """
    return ByteTokenizer(text_vocab) if path is None else FileTokenizer(path, text_vocab)


class FileTokenizer:
    """A `tokenizer.json`. Its special tokens are those that `tokenizer_config.json` beside it names.

    Where there is no such file they are its special tokens of the usual names. A tokenizer may lack a begin or an end; one
    that lacks a pad fills up with its end, or with id 0: what fills up is masked.

    Raises:
        ConfigurationError: it has ids that are not below `text_vocab`.
        DataError: a file is missing or damaged.
    """

    def __init__(self, path: Path, text_vocab: int) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  # the library raises nothing more specific
            raise DataError(f"{path}: not readable as a tokenizer ({' '.join(str(error).split())})") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        highest = max(self._tokenizer.get_vocab().values(), default=-1)
        if highest >= text_vocab:
            raise ConfigurationError(f"{path}: has ids up to {highest}, and the policy's text_vocab is {text_vocab}")
        config = path.with_name("tokenizer_config.json")
        special = self._named_in(config) if config.is_file() else self._usual()
        self.bos, self.eos = special["bos"], special["eos"]
        self.pad: int = next(i for i in (special["pad"], self.eos, 0) if i is not None)

    def encode(self, text: str) -> list[int]:
        """Token ids, without begin and end."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens are left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _usual(self) -> dict[str, int | None]:
        """The ids of pad, begin and end; None for one that there is not."""
        ids = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return {name: next((ids[usual] for usual in names if usual in ids), None) for name, names in _USUAL.items()}

    def _named_in(self, config: Path) -> dict[str, int | None]:
        """The same, as a file says."""
        try:
            named = json.loads(config.read_text(encoding="utf-8"))
            tokens = {name: named.get(f"{name}_token") for name in _USUAL}
            contents = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
            ids = {name: content and self._tokenizer.token_to_id(content) for name, content in contents.items()}
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{config}: not a tokenizer's configuration ({type(error).__name__}: {error})") from None
        for name, content in contents.items():
            if content and ids[name] is None:
                raise DataError(f"{config}: {name}_token is {content!r}, which the tokenizer beside it lacks")
        return ids
