"""Bytes of collectives, of the larger of input and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchbox.estimation.groups import fake_process_group
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 4
whole, shard = torch.zeros(RANKS * 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_reduce", lambda: dist.all_reduce(whole)),
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, shard)),
        ("all_gather", lambda: dist.all_gather(list(whole.split(3)), shard)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(shard, whole)),
        ("reduce_scatter", lambda: dist.reduce_scatter(shard, list(whole.split(3)))),
        ("broadcast", lambda: dist.broadcast(whole, src=0)),
    ],
)
def test_a_collective_counts_the_bytes_of_the_whole_on_whichever_side_it_is(name: str, call: Callable[[], object]) -> None:
    counter = CollectiveCounter()
    with fake_process_group(RANKS), OperationDispatchMode(counter):
        call()
    assert counter.counts == {name: {"count": 1, "bytes": whole.nbytes}}
