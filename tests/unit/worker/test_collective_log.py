"""Collectives that a rank writes when it is stuck."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from benchbox.store.rank_collectives import LAST_CALLS, read_rank_collectives
from benchbox.worker.collective_log import write_collectives

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.registry.launch_record import CollectiveCall


def written_calls(folder: Path) -> Sequence[CollectiveCall]:
    write_collectives(folder / "collectives.json")
    written = read_rank_collectives(folder / "collectives.json")
    assert written is not None
    return written["calls"]


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."), reason="torch 2.10 records none of gloo unless TORCH_FR_BUFFER_SIZE is set"
)
def test_they_are_the_last_ones_of_many_the_oldest_first(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size in range(1, LAST_CALLS + 5):
            dist.all_reduce(torch.zeros(size))
        calls, deadline = written_calls(tmp_path), time.monotonic() + 60
        while not all(call["is_done"] for call in calls) and time.monotonic() < deadline:  # noted by a thread, a moment later
            calls = written_calls(tmp_path)
    finally:
        dist.destroy_process_group()
    assert [call["shapes"] for call in calls] == [[[size]] for size in range(5, LAST_CALLS + 5)]
    assert all(call["is_done"] for call in calls)
