"""Text losses over the vocabulary of PaliGemma: peak memory and time of the head's cross-entropy, and of all logits at once."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from benchbox.measure.memory import TensorStorageTracker
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

pytestmark = pytest.mark.perf

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable
head_cross_entropy = importlib.import_module("benchbox_policies._layers.nn.cross_entropy").head_cross_entropy

VOCABULARY, WIDTH = 257_152, 64  # the width of pi05 is 2048: its weight would hide the logits on a small machine
SAMPLES, TOKENS = 16, 52


def all_logits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float().transpose(1, 2), targets, reduction="none")


def test_the_cross_entropy_of_the_head_takes_a_fraction_of_the_memory_of_all_logits(benchmark, capsys) -> None:
    """832 tokens, forward and backward, one after the other in one process. One product of four is a recomputation.

    The time was 0.39 to 0.60 of that of all logits: one step of each tells it from the bound.
    """
    x = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))

    def step(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        x.grad = weight.grad = None
        begin = time.perf_counter()
        function(x, weight, targets).mean().backward()
        return time.perf_counter() - begin

    peaks = {}
    for function in (all_logits, head_cross_entropy):
        with TensorStorageTracker([x, weight]) as tracker:
            step(function)
        peaks[function] = tracker.peak_bytes
    ratio = benchmark.pedantic(step, args=(head_cross_entropy,), rounds=1) / step(all_logits)
    before, after = peaks[all_logits], peaks[head_cross_entropy]
    record_ratio(benchmark, "peak_memory_over_all_logits", after / before, better="lower", goal=0.5)
    record_ratio(benchmark, "time_over_all_logits", ratio, better="lower", goal=1.0)
    with capsys.disabled():
        print(
            f"\ntext loss of {SAMPLES * TOKENS} tokens over {VOCABULARY} words: peak {before / 2**20:.0f} MiB with all logits, "
            f"{after / 2**20:.0f} MiB in chunks ({after / before:.2f}); {ratio:.2f} of the time"
        )
    assert after < before / 2
    assert ratio < 1
