"""FAST turns chunks into few tokens and back, the same in every process."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from benchbox.data.fast import FastTokenizer
from benchbox.errors import ConfigurationError, DataError

HORIZON, VOCAB = 20, 512


def chunks(count=200, dims=4, seed=0):
    """Smooth motions in [-1, 1]: a few slow waves a dimension."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, HORIZON)[:, None]
    return [
        np.clip(0.9 * np.sin(2 * np.pi * (rng.uniform(0, 1, dims) * time + rng.uniform(0, 1, dims))), -1, 1)
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return FastTokenizer.train(chunks(), horizon=HORIZON, vocab=VOCAB)


def test_a_chunk_survives_to_within_rounding(tokenizer):
    for chunk in chunks(50, seed=1):
        np.testing.assert_allclose(tokenizer.decode(tokenizer.encode(chunk)), chunk, atol=HORIZON**0.5 / 20 + 1e-9)


def test_even_chunks_unlike_any_it_was_trained_on_survive(tokenizer):
    rng = np.random.default_rng(2)
    for chunk in (rng.uniform(-1, 1, (HORIZON, 4)), np.ones((HORIZON, 4)), -np.ones((HORIZON, 4))):
        np.testing.assert_allclose(tokenizer.decode(tokenizer.encode(chunk)), chunk, atol=HORIZON**0.5 / 20 + 1e-9)


def test_smooth_chunks_take_far_fewer_tokens_than_values(tokenizer):
    lengths = [len(tokenizer.encode(chunk)) for chunk in chunks(50, seed=3)]
    assert np.mean(lengths) < HORIZON * 4 / 3


def test_values_outside_the_range_are_clipped(tokenizer):
    chunk = chunks(1, seed=4)[0]
    assert tokenizer.encode(chunk * 100) == tokenizer.encode(np.clip(chunk * 100, -1, 1))


def test_the_pad_id_is_never_a_token(tokenizer):
    assert tokenizer.pad == VOCAB - 1
    assert max(max(tokenizer.encode(chunk)) for chunk in chunks(50, seed=5)) < tokenizer.pad


def test_it_is_saved_and_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "fast.json")
    loaded = FastTokenizer.load(tmp_path / "fast.json")
    chunk = chunks(1, seed=6)[0]
    assert loaded.encode(chunk) == tokenizer.encode(chunk)
    assert (loaded.horizon, loaded.vocab) == (HORIZON, VOCAB)


def test_every_process_trains_the_same_tokenizer(tokenizer, tmp_path):
    """Ranks each train their own; hash seeds differ between them."""
    code = """
import sys, pathlib
from tests.unit.data.test_fast import HORIZON, VOCAB, chunks
from benchbox.data.fast import FastTokenizer
FastTokenizer.train(chunks(), horizon=HORIZON, vocab=VOCAB).save(pathlib.Path(sys.argv[1]))
"""
    tokenizer.save(tmp_path / "here.json")
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "5", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there.json")], check=True, env=environment)
    here, there = (hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("here.json", "there.json"))
    assert here == there


def test_a_vocabulary_too_small_for_the_alphabet_is_refused():
    with pytest.raises(ConfigurationError, match="fast_vocab is 64, and chunks of 20 steps need at least 92"):
        FastTokenizer.train(chunks(1), horizon=HORIZON, vocab=64)


def test_ids_that_are_not_a_chunk_are_refused(tokenizer):
    with pytest.raises(DataError, match="are not a chunk of 20 steps"):
        tokenizer.decode(tokenizer.encode(chunks(1)[0])[:1])


def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path):
    (tmp_path / "fast.json").write_text("{}")
    with pytest.raises(DataError, match=r"fast\.json: not a saved FAST tokenizer"):
        FastTokenizer.load(tmp_path / "fast.json")
