"""FAST: an action chunk as a few tokens. Cosine transform, rounding, byte-pair encoding (Pertsch et al., 2025)."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Self

import numpy as np
from scipy.fft import dct, idct

from benchbox.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# The byte-pair encoder is a thread pool; processes forked from one that used it warn and hang. Chunks are too short to need it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer, decoders, models, trainers

SCALE = 10.0  # rounding loses at most half of 1 / SCALE of each coefficient
ALPHABET = 0x4E00  # coefficients become letters from here on: a block of Unicode with 20 000 letters and no spaces


class FastTokenizer:
    """Chunks (N, D), normalised to [-1, 1], to token ids and back.

    Along each dimension the orthonormal cosine transform packs a smooth motion into a few low frequencies; rounding makes
    the rest zero; byte-pair encoding, lowest frequency of every dimension first, makes runs of them one token. No coefficient
    of a chunk within [-1, 1] exceeds sqrt(N), so the alphabet is closed: every chunk can be encoded.

    Ids are below `vocab` - 1; `pad`, the last one, is never a token.

    Raises:
        ConfigurationError: `vocab` cannot hold the alphabet of such chunks.
    """

    def __init__(self, tokenizer: Tokenizer, *, horizon: int, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.horizon = horizon
        self.vocab = vocab
        self.pad = vocab - 1
        self._bound = _bound(horizon)

    @classmethod
    def train(cls, chunks: Iterable[np.ndarray], *, horizon: int, vocab: int) -> Self:
        """Learn the merges from chunks (N, D) in [-1, 1]: the same ones, in the same order, give the same tokenizer."""
        bound = _bound(horizon)
        letters = [chr(ALPHABET + i) for i in range(2 * bound + 1)]
        if len(letters) > vocab - 1:
            raise ConfigurationError(
                f"fast_vocab is {vocab}, and chunks of {horizon} steps need at least {len(letters) + 1}: "
                "raise fast_vocab or shorten the horizon"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(vocab_size=vocab - 1, min_frequency=2, initial_alphabet=letters, show_progress=False)
        tokenizer.train_from_iterator((_letters(chunk, bound) for chunk in chunks), trainer)
        return cls(tokenizer, horizon=horizon, vocab=vocab)

    def encode(self, chunk: np.ndarray) -> list[int]:
        """Token ids of a chunk (N, D); values outside [-1, 1] are clipped."""
        ids: list[int] = self._tokenizer.encode(_letters(chunk, self._bound)).ids
        return ids

    def decode(self, ids: Sequence[int]) -> np.ndarray:
        """The chunk (N, D) those ids stand for, to within rounding: at most sqrt(N) / (2 * SCALE) a value.

        Raises:
            DataError: not the ids of a whole chunk.
        """
        text = self._tokenizer.decode(list(ids))
        levels = np.array([ord(letter) for letter in text], dtype=np.float64) - ALPHABET - self._bound
        if not levels.size or levels.size % self.horizon:
            raise DataError(f"{levels.size} coefficients are not a chunk of {self.horizon} steps")
        return idct(levels.reshape(self.horizon, -1) / SCALE, axis=0, norm="ortho")  # type: ignore[no-any-return]

    def save(self, path: Path) -> None:
        """As JSON."""
        state = {"horizon": self.horizon, "vocab": self.vocab, "tokenizer": json.loads(self._tokenizer.to_str())}
        path.write_text(json.dumps(state), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote.

        Raises:
            DataError: the file is missing or something else.
        """
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            tokenizer = Tokenizer.from_str(json.dumps(state["tokenizer"]))
            return cls(tokenizer, horizon=state["horizon"], vocab=state["vocab"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: not a saved FAST tokenizer ({type(error).__name__}: {error})") from None


def _bound(horizon: int) -> int:
    return math.ceil(SCALE * math.sqrt(horizon))


def _letters(chunk: np.ndarray, bound: int) -> str:
    coefficients = dct(np.clip(chunk, -1, 1).astype(np.float64), axis=0, norm="ortho")  # (N, D), lowest frequency first
    levels = np.rint(coefficients * SCALE).astype(np.int64) + bound
    return "".join(chr(ALPHABET + level) for level in levels.ravel())
