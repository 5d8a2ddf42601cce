"""Tokenizers read from local files in the format of Hugging Face's tokenizers library."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import tokenizers

from benchbox.data.text.prompt import ByteTokenizer
from benchbox.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.data.text.prompt import Tokenizer

_COMMON_SPECIAL_TOKENS = {  # for a tokenizer without tokenizer_config.json
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "<s>", "[BOS]", "<|begin_of_text|>"),
    "eos": ("<eos>", "</s>", "[EOS]", "<|end_of_text|>", "<|endoftext|>"),
}


def open_tokenizer(path: Path | None, text_vocab: int) -> Tokenizer:
    """Open the tokenizer in a file, or the byte tokenizer if `path` is None.

    Raises:
        ConfigurationError: it has ids outside the policy's text vocabulary.
        DataError: the file is missing or damaged.
    """
    return ByteTokenizer(text_vocab) if path is None else FileTokenizer(path, text_vocab)


class FileTokenizer:
    """Tokenizer of a `tokenizer.json`, with the special tokens named in `tokenizer_config.json` in the same folder.

    Without that file its special tokens with common names are used. `bos` and `eos` may be missing. A `bos` that the file names
    and transformers would not put before a text, as with SmolVLM's, counts as missing. Without a pad token the padding is
    `eos`, or id 0: padding is masked.

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
        special = self._read_special_tokens(config) if config.is_file() else self._guess_special_tokens()
        self.bos, self.eos = special["bos"], special["eos"]
        self.pad: int = next(i for i in (special["pad"], self.eos, 0) if i is not None)

    def encode(self, text: str) -> list[int]:
        """Return the token ids, without `bos` and `eos`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _guess_special_tokens(self) -> dict[str, int | None]:
        """Return the ids of pad, bos and eos by their common names, None for a missing one."""
        ids = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return {
            name: next((ids[content] for content in contents if content in ids), None)
            for name, contents in _COMMON_SPECIAL_TOKENS.items()
        }

    def _read_special_tokens(self, config: Path) -> dict[str, int | None]:
        """Return the ids of pad, bos and eos that a configuration file names, None for a missing one."""
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
            tokens = {name: settings.get(f"{name}_token") for name in _COMMON_SPECIAL_TOKENS}
            contents = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
            ids = {name: content and self._tokenizer.token_to_id(content) for name, content in contents.items()}
        except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
            raise DataError(f"{config}: not a tokenizer's configuration ({type(error).__name__}: {error})") from None
        for name, content in contents.items():
            if content and ids[name] is None:
                raise DataError(f"{config}: {name}_token is {content!r}, which the tokenizer beside it lacks")
        adds_bos = settings.get("add_bos_token")
        if not (self._tokenizer.encode("").ids[:1] == [ids["bos"]] if adds_bos is None else adds_bos):
            ids["bos"] = None
        return ids
