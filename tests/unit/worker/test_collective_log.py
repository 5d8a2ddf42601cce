"""Collectives that a rank writes when it is stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchbox.store.rank_collectives import LAST_CALLS, read_rank_collectives
from benchbox.worker.collective_log import write_collectives

if TYPE_CHECKING:
    from pathlib import Path


def test_they_are_the_last_ones_of_many_the_oldest_first(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size in range(1, LAST_CALLS + 5):
            dist.all_reduce(torch.zeros(size))
        write_collectives(tmp_path / "collectives.json")
    finally:
        dist.destroy_process_group()
    written = read_rank_collectives(tmp_path / "collectives.json")
    assert written is not None
    assert [call["shapes"] for call in written["calls"]] == [[[size]] for size in range(5, LAST_CALLS + 5)]
    assert all(call["is_done"] for call in written["calls"])
