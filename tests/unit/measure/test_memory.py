from __future__ import annotations

import gc
from contextlib import suppress
from operator import call

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchbox.measure.memory import TensorStorageTracker, limit_memory, peak_memory, release_cached_memory, reset_peak_memory

KIB = 1024


def kib(count):
    return torch.zeros(count * 256)  # float32


def test_peak_is_the_most_that_lived_at_once():
    with TensorStorageTracker() as tracker:
        a = kib(4)
        b = kib(8)
        del a
        c = kib(2)
        assert tracker.current_bytes == 10 * KIB
        del b, c
    assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 12 * KIB


def test_the_operation_that_exceeds_a_limit_raises_and_one_that_reaches_it_does_not():
    with TensorStorageTracker(limit_bytes=8 * KIB):
        a = kib(4)
        b = kib(4)
        with pytest.raises(torch.OutOfMemoryError, match=r"aten.*: tensors take .* MiB on this rank, and measure.memory_limit"):
            a + b


def test_the_error_names_the_operation_that_took_the_memory_and_not_one_that_ran_while_it_was_raised():
    """FSDP gathers parameters by resizing a storage, inside a region of the profiler that ends with an operation."""
    gathered = kib(1)
    region = torch.profiler.record_function("FSDP._pre_forward")
    with TensorStorageTracker([gathered], limit_bytes=8 * KIB), pytest.raises(torch.OutOfMemoryError) as raised, region:
        gathered.untyped_storage().resize_(16 * KIB)
    assert raised.value.operation == "storage.resize_"


def test_a_step_that_fits_without_the_state_of_the_optimizer_exceeds_the_limit_with_it():
    """Adam's moments take as much as weights and gradients, from the second step on."""
    model = nn.Linear(256, 256, bias=False)  # 256 KiB
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def step():
        model(torch.ones(8, 256)).sum().backward()
        activations = torch.zeros(256, 256)  # the fifth 256 KiB where there are moments, the third before
        del activations
        optimizer.step()
        optimizer.zero_grad()

    steps = iter((step, step, step))
    with pytest.raises(torch.OutOfMemoryError), limit_memory(model, torch.device("cpu"), 1100 * KIB):
        list(map(call, steps))
    assert len(list(steps)) == 1, "the second one exceeds it"


def test_a_limit_that_was_exceeded_is_an_error_also_where_the_policy_goes_on():
    """On a GPU the next allocation fails as well."""

    def step():
        with suppress(RuntimeError):
            torch.zeros(1024 * KIB // 4)

    limit = limit_memory(nn.Linear(2, 2), torch.device("cpu"), 512 * KIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"tensors take 1\.0 MiB on this rank"), limit:
        step()


def test_without_a_limit_nothing_is_watched():
    with limit_memory(nn.Linear(2, 2), torch.device("cpu"), None):
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_views_and_tensors_of_one_storage_count_once():
    with TensorStorageTracker() as tracker:
        a = kib(4)
        b = a.view(-1, 256)[1:]
        del a
        assert tracker.current_bytes == 4 * KIB, "the view keeps all of the storage"
        del b
        assert tracker.current_bytes == 0


def test_an_existing_tensor_counts_from_the_beginning_whenever_an_operation_first_reads_it():
    a, b = kib(4), kib(8)
    with TensorStorageTracker([a]) as tracker:
        assert tracker.current_bytes == 4 * KIB
        c = kib(2)
        del c
        b.add_(1)
        assert tracker.current_bytes == 12 * KIB
    assert tracker.peak_bytes == 14 * KIB, "all three lived at once"


def test_a_storage_restored_from_nothing_did_not_exist_before():
    """FSDP keeps the storages of gathered parameters at size zero between uses."""
    gathered = kib(4)
    gathered.untyped_storage().resize_(0)
    with TensorStorageTracker() as tracker:
        a = kib(8)
        del a
        gathered.untyped_storage().resize_(4 * KIB)
        gathered.add_(1)
        assert tracker.current_bytes == 4 * KIB
    assert tracker.peak_bytes == 8 * KIB


def test_resizing_a_storage_releases_memory():
    """FSDP frees gathered parameters this way, while their tensors live on."""
    original = torch.UntypedStorage.resize_
    with TensorStorageTracker() as tracker:
        a = kib(4)
        a.untyped_storage().resize_(0)
        assert tracker.current_bytes == 0
        a.untyped_storage().resize_(2 * KIB)
        assert tracker.current_bytes == 2 * KIB
    assert torch.UntypedStorage.resize_ is original


def test_a_linear_step_by_hand():
    """Parameters, their gradients, input, output, and what the sum's backward expands without copying."""
    layer, x = nn.Linear(256, 128, bias=False), torch.zeros(64, 256)
    with TensorStorageTracker(layer.parameters()) as tracker:
        layer(x).sum().backward()
    weight, batch, output, scalar = 256 * 128 * 4, 64 * 256 * 4, 64 * 128 * 4, 4
    # at the end of backward: weight, gradient, input, and the sum with the scalar gradient it starts from; the output was
    # freed when the sum was taken
    assert tracker.peak_bytes == max(weight + batch + output + scalar, 2 * weight + batch + 2 * scalar)


def test_the_peak_of_a_step_is_that_of_the_mem_tracker_of_torch():
    """torch's MemTracker counts the same model and steps; it knows modules and optimizers and gets the existing objects."""

    def build():
        gc.collect()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
        return model, torch.optim.AdamW(model.parameters()), torch.randn(32, 64)

    def step(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, x = build()
    step(model, optimizer, x)
    with TensorStorageTracker(model.parameters()) as tracker:
        step(model, optimizer, x)

    model, optimizer, x = build()
    step(model, optimizer, x)
    reference = MemTracker()
    reference.track_external(model, optimizer, x)
    with reference:
        step(model, optimizer, x)
    assert tracker.peak_bytes == reference.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def test_a_device_without_counters_has_no_peak_of_its_own():
    assert peak_memory(torch.device("cpu")) is None


def test_only_a_device_with_an_allocator_of_its_own_releases_and_resets(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        release_cached_memory(device)
        reset_peak_memory(device)
    assert calls == ["empty_cache", "init", "reset cuda:1"]
