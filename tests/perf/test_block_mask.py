"""The block mask of FlexAttention: peak memory and time of building it from its structure, and from a dense mask."""

from __future__ import annotations

import importlib
import time
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchbox.measure.memory import TensorStorageTracker
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.perf

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable
AttentionMask = importlib.import_module("benchbox_policies._layers.sequence.attention_mask").AttentionMask

SAMPLES, IMAGES, TEXT = 8, 3 * 256, 200  # of pi05 in full size
ROUNDS = 5


def test_a_block_mask_of_structure_takes_a_fraction_of_the_memory_and_time_of_a_dense_one(benchmark, capsys) -> None:
    """Images that attend to one another and a text that attends to them, in turns in one process; a text is half padding."""
    length = IMAGES + TEXT
    groups = torch.ones(length, dtype=torch.int64)
    valid = torch.arange(length) < torch.tensor([length - TEXT // 2, length])[:, None].repeat(SAMPLES // 2, 1)
    positions = valid.long().cumsum(dim=1) - 1
    mask = AttentionMask(
        query_groups=groups,
        key_groups=groups,
        query_valid=valid,
        key_valid=valid,
        query_positions=positions,
        key_positions=positions,
    )

    def structure():
        return mask.block_mask()

    def dense():
        return create_block_mask(mask.block_mask().mask_mod, SAMPLES, None, length, length, device="cpu")

    def timed(build: Callable[[], object]) -> float:
        begin = time.perf_counter()
        build()
        return time.perf_counter() - begin

    assert torch.equal(structure().to_dense(), dense().to_dense())
    peaks = {}
    for build in (dense, structure):
        with TensorStorageTracker([]) as tracker:
            build()
        peaks[build] = tracker.peak_bytes
    ratios = [timed(structure) / timed(dense) for _ in range(ROUNDS)]
    benchmark.pedantic(structure, rounds=ROUNDS)
    before, after = peaks[dense], peaks[structure]
    record_ratio(benchmark, "block_mask_memory_over_dense", after / before, better="lower", goal=0.1)
    record_ratio(benchmark, "block_mask_time_over_dense", ratios, better="lower", goal=0.5)
    with capsys.disabled():
        print(
            f"\nblock mask of {SAMPLES} x {length} x {length} scores: {before / 2**20:.1f} MiB from a dense mask, "
            f"{after / 2**20:.2f} MiB from its structure; {median(ratios):.3f} of the time"
        )
    assert after < 0.1 * before
    assert median(ratios) < 0.5
