"""FAST turns chunks into few tokens and back, the same in every process."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchbox.data.text.fast import FastTokenizer
from benchbox.errors import ConfigurationError, DataError
from tests.support.action_chunks import HORIZON, VOCAB, smooth_chunks


@pytest.fixture(scope="module")
def tokenizer():
    return FastTokenizer.train(smooth_chunks(), horizon=HORIZON, vocab=VOCAB)


def test_a_chunk_survives_to_within_rounding(tokenizer):
    for chunk in smooth_chunks(50, seed=1):
        np.testing.assert_allclose(tokenizer.decode(tokenizer.encode(chunk)), chunk, atol=HORIZON**0.5 / 20 + 1e-9)


def test_even_chunks_unlike_any_it_was_trained_on_survive(tokenizer):
    rng = np.random.default_rng(2)
    for chunk in (rng.uniform(-1, 1, (HORIZON, 4)), np.ones((HORIZON, 4)), -np.ones((HORIZON, 4))):
        np.testing.assert_allclose(tokenizer.decode(tokenizer.encode(chunk)), chunk, atol=HORIZON**0.5 / 20 + 1e-9)


def test_smooth_chunks_take_far_fewer_tokens_than_values(tokenizer):
    lengths = [len(tokenizer.encode(chunk)) for chunk in smooth_chunks(50, seed=3)]
    assert np.mean(lengths) < HORIZON * 4 / 3


def test_values_outside_the_range_are_clipped(tokenizer):
    chunk = smooth_chunks(1, seed=4)[0]
    assert tokenizer.encode(chunk * 100) == tokenizer.encode(np.clip(chunk * 100, -1, 1))


def test_the_pad_id_is_never_a_token(tokenizer):
    assert tokenizer.pad == VOCAB - 1
    assert max(max(tokenizer.encode(chunk)) for chunk in smooth_chunks(50, seed=5)) < tokenizer.pad


def test_a_vocabulary_too_small_for_the_alphabet_is_refused():
    with pytest.raises(ConfigurationError, match="fast_vocab is 64, and chunks of 20 steps need at least 92"):
        FastTokenizer.train(smooth_chunks(1), horizon=HORIZON, vocab=64)


def test_ids_that_are_not_a_chunk_are_refused(tokenizer):
    with pytest.raises(DataError, match="are not a chunk of 20 steps"):
        tokenizer.decode(tokenizer.encode(smooth_chunks(1)[0])[:1])


@pytest.mark.parametrize(("part", "is_other"), [("merges", True), ("vocab", True), ("decoder", False)])
def test_its_digest_is_of_the_tokens_and_not_of_the_format_of_the_library(tokenizer, part, is_other):
    content = json.loads(tokenizer._tokenizer.to_str())
    if part == "merges":
        content["model"]["merges"][:2] = content["model"]["merges"][1::-1]
    elif part == "vocab":
        first, second, *_ = content["model"]["vocab"]
        vocab = content["model"]["vocab"]
        vocab[first], vocab[second] = vocab[second], vocab[first]
    else:
        content["decoder"] = None
    changed = FastTokenizer(Tokenizer.from_str(json.dumps(content)), horizon=HORIZON, vocab=VOCAB)
    assert (changed.sha256 != tokenizer.sha256) == is_other
