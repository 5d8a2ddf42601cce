"""FAST action tokens: cosine transform, rounding and byte-pair encoding of action chunks (Pertsch et al., arXiv:2501.09747)."""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import TYPE_CHECKING, Self

import numpy as np
from scipy.fft import dct, idct

from benchbox.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The byte-pair encoder uses a thread pool. A process that is forked after its use warns and hangs. Chunks are too short for it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tokenizers import Tokenizer, decoders, models, trainers

SCALE = 10.0  # rounding changes each coefficient by at most 0.5 / SCALE
FIRST_LETTER = 0x4E00  # coefficients become letters from here on: a block of Unicode with 20 000 letters and no spaces


class FastTokenizer:
    """Tokenizer of action chunks (N, D) normalised to [-1, 1].

    Along each dimension the orthonormal cosine transform concentrates a smooth motion in a few low frequencies; rounding makes
    the other coefficients zero; byte-pair encoding, which starts with the lowest frequency of every dimension, merges runs of
    them into one token. No coefficient of a chunk within [-1, 1] exceeds sqrt(N), so the alphabet is finite: every chunk can be
    encoded.

    Token ids are below `vocab` - 1. The last id, `pad`, is never a token.

    Raises:
        ConfigurationError: `vocab` is smaller than the alphabet of such chunks.
    """

    def __init__(self, tokenizer: Tokenizer, *, horizon: int, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.horizon = horizon
        self.vocab = vocab
        self.pad = vocab - 1
        self._max_level = _max_level(horizon)

    @classmethod
    def train(cls, chunks: Iterable[np.ndarray], *, horizon: int, vocab: int) -> Self:
        """Learn the merges from chunks (N, D) in [-1, 1]. The result is a function of the chunks and their order."""
        max_level = _max_level(horizon)
        letters = [chr(FIRST_LETTER + i) for i in range(2 * max_level + 1)]
        if len(letters) > vocab - 1:
            raise ConfigurationError(
                f"fast_vocab is {vocab}, and chunks of {horizon} steps need at least {len(letters) + 1}: "
                "raise fast_vocab or shorten the horizon"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.Fuse()
        trainer = trainers.BpeTrainer(vocab_size=vocab - 1, min_frequency=2, initial_alphabet=letters, show_progress=False)
        tokenizer.train_from_iterator((_to_letters(chunk[None], max_level)[0] for chunk in chunks), trainer)
        return cls(tokenizer, horizon=horizon, vocab=vocab)

    @property
    def sha256(self) -> str:
        """SHA-256 of the vocabulary and the merges."""
        model = json.loads(self._tokenizer.to_str())["model"]  # beside it are fields of the library's format
        content = [sorted(model["vocab"].items()), model["merges"]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def encode(self, chunk: np.ndarray) -> list[int]:
        """Return the token ids of a chunk (N, D); values outside [-1, 1] are clipped."""
        return self.encode_chunks(chunk[None])[0]

    def encode_chunks(self, chunks: np.ndarray) -> list[list[int]]:
        """Return the token ids of chunks (n, N, D); values outside [-1, 1] are clipped."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(_to_letters(chunks, self._max_level))]

    def decode(self, ids: Sequence[int]) -> np.ndarray:
        """Return the chunk (N, D) of the token ids, with a rounding error of at most sqrt(N) / (2 * SCALE) per value.

        Raises:
            DataError: the ids do not form a complete chunk.
        """
        text = self._tokenizer.decode(list(ids))
        levels = np.array([ord(letter) for letter in text], dtype=np.float64) - FIRST_LETTER - self._max_level
        if not levels.size or levels.size % self.horizon:
            raise DataError(f"{levels.size} coefficients are not a chunk of {self.horizon} steps")
        return idct(levels.reshape(self.horizon, -1) / SCALE, axis=0, norm="ortho")  # type: ignore[no-any-return]


def _max_level(horizon: int) -> int:
    return math.ceil(SCALE * math.sqrt(horizon))


def _to_letters(chunks: np.ndarray, max_level: int) -> list[str]:
    coefficients = dct(np.clip(chunks, -1, 1).astype(np.float64), axis=1, norm="ortho")  # (n, N, D), lowest frequency first
    levels = np.rint(coefficients * SCALE).astype(np.int32) + max_level
    letters = (FIRST_LETTER + levels).astype("<u4")
    return [chunk.tobytes().decode("utf-32-le") for chunk in letters]
