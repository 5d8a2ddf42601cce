"""Batches that are copied ahead of the step are those of the host."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.data.loading.loader import MicroBatchStream, open_stream
from benchbox.session.build import build_cell_policy
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell


def open_batches(cell: Cell) -> MicroBatchStream:
    spec = build_cell_policy(cell).batch_spec()
    arguments = {"batch": 2, "accumulation": 1, "rank": 0, "world_size": 1, "seed": 0}
    return open_stream(cell.data, spec, order=cell.order, **arguments)


@pytest.mark.parametrize("order", ["frame_shuffle", "episode_shuffle"])
def test_batches_on_the_device_are_those_of_the_host(cuda: torch.device, monkeypatch, order: str) -> None:
    cell = tiny_cell(backend="single", world_size=1, order=order)
    copies = []
    with closing(open_batches(cell)) as stream:
        for batch in islice(stream, 6):
            assert {tensor.device.type for tensor in batch.values()} == {cuda.type}
            torch.cuda._sleep(10**7)  # the step still runs while the next batch arrives
            copies.append({name: tensor.clone() for name, tensor in batch.items()})
            del batch  # its memory may be used again
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with closing(open_batches(cell)) as stream:
        for copy, batch in zip(copies, islice(stream, 6), strict=True):
            assert all(torch.equal(copy[name].cpu(), tensor) for name, tensor in batch.items())
