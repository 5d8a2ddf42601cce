"""Sizes of shards and buckets, as the libraries compute them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchbox.theory.padding import ddp_buckets, fsdp1_flat_numel, fsdp2_shard_numel, zero_buckets, zero_group_numel
from benchbox.theory.sharding.replicated import scratch_numel


@pytest.mark.parametrize(("rows", "shards"), [(7, 2), (8, 2), (3, 4), (1, 3), (10, 4)])
def test_fsdp2_pads_to_the_largest_chunk_of_torch(rows, shards):
    chunks = torch.chunk(torch.empty(rows, 5), shards)
    assert fsdp2_shard_numel((rows, 5), shards) == max(chunk.numel() for chunk in chunks)


def test_fsdp1_aligns_every_parameter_to_16_bytes():
    """In bfloat16 the second begins at 8 although the first has 3 elements, and 3 ranks get 4 elements each."""
    assert fsdp1_flat_numel([3, 2], 1, 2) == 10
    assert fsdp1_flat_numel([3, 2], 3, 2) == 12
    assert fsdp1_flat_numel([3, 2], 1, 4) == 6


def test_zero_pads_a_group_to_two_elements_for_each_rank():
    assert zero_group_numel([5, 4], 2) == 12


def test_ddp_buckets_are_those_that_torch_assigns():
    sizes = [200_000, 90_000, 100_000, 5_000_000, 2_000_000, 10]
    tensors = [nn.Parameter(torch.empty(size)) for size in sizes]
    assigned, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(tensors, [2**20, 25 * 2**20])
    expected = [4 * sum(sizes[index] for index in bucket) for bucket in assigned]
    assert ddp_buckets(4 * size for size in sizes) == expected
    assert len(expected) == 3


def test_a_deepspeed_bucket_is_reduced_before_the_gradient_that_would_overflow_it():
    assert zero_buckets([4, 5, 2, 12, 1], 10) == [9, 2, 12, 1]


@pytest.mark.parametrize(
    ("groups", "numel"),
    [([[6, 4, 4]], 8), ([[20]], 8), ([[3], [4]], 4), ([[3, 4], [5]], 7), ([], 0)],
    ids=["closed before it overflows", "in chunks", "a bucket of each group", "the fullest", "nothing"],
)
def test_the_scratch_of_masters_is_the_fullest_bucket_of_any_group(groups, numel):
    assert scratch_numel(groups, 8) == numel
