"""Agreement of ranks on optional blocks: its reads of the device, its collectives, and fields that are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchbox_policies._layers.sequence.presence import agree_on_presence

from benchbox.errors import DataError
from benchbox.observer.hooks.dispatch import OperationDispatchMode

FIELDS = ("images", "actions")
BATCH = {"images": torch.ones(2, 3), "actions": torch.ones(2, 4), "subgoal_mask": torch.tensor([False, True])}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Act as rank 1 of 2 and return the list of all reads from tensors and collectives from now on."""
    recorded: list[str] = []

    def record(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            recorded.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, record(name, getattr(torch.Tensor, name)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", record("all_reduce", lambda *_, **__: None))
    return recorded


class Operations:
    """Counts the tensor operations that run."""

    def __init__(self) -> None:
        self.count = 0

    def on_operation(self, *_: Any) -> None:
        self.count += 1


def test_nothing_is_read_reduced_or_computed_where_nothing_is_optional(calls: list[str]) -> None:
    operations = Operations()
    with OperationDispatchMode(operations):
        assert agree_on_presence(BATCH, FIELDS, {}) == frozenset()
    assert calls == []
    assert operations.count == 0


def test_optional_blocks_cost_one_all_reduce_and_one_read(calls: list[str]) -> None:
    optional = {"subgoal": "subgoal_mask", "response": "response_mask"}
    assert agree_on_presence(BATCH, FIELDS, optional) == {"subgoal"}
    assert calls == ["all_reduce", "tolist"]


@pytest.mark.parametrize("optional", [{}, {"subgoal": "subgoal_mask"}])
@pytest.mark.usefixtures("calls")
def test_a_missing_field_is_an_error_with_its_name_and_rank(optional: dict[str, str]) -> None:
    with pytest.raises(DataError, match="the batch lacks what the policy needs: rank 1 has no 'proprioception'"):
        agree_on_presence(BATCH, (*FIELDS, "proprioception"), optional)


def test_every_optional_block_of_a_batch_without_values_is_present(calls: list[str]) -> None:
    batch = {name: tensor.to("meta") for name, tensor in BATCH.items()}
    assert agree_on_presence(batch, FIELDS, {"subgoal": "subgoal_mask"}) == {"subgoal"}
    assert calls == []
