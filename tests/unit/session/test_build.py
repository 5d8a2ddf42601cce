"""What a session refuses before it is built."""

from __future__ import annotations

import sys

import pytest
import torch

from benchbox.errors import UnsupportedError
from benchbox.session.build import build_cell_policy, build_session
from benchbox.spec.cell import Cell, DataSpec


def cell(**changes: object) -> Cell:
    values = {
        "policy": "pi05",
        "size": "tiny",
        "backend": "single",
        "world_size": 1,
        "batch": 1,
        "data": DataSpec(kind="synthetic"),
    }
    return Cell(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"backend": "zero3", "world_size": 2, "checkpointing": True}, "zero3 refuses activation checkpointing"),
        ({"backend": "hsdp", "world_size": 2}, "hsdp needs at least 4 ranks"),
        ({"world_size": 2}, "single runs on at most 1 rank"),
        ({"backend": "zero2", "world_size": 2, "recipe": "bf16_stochastic"}, "zero2 has no bf16_stochastic recipe"),
        ({"policy": "value", "freeze": "train_expert_only"}, "freeze train_expert_only needs a tower expert, and Value trains"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(changes: dict[str, object], because: str) -> None:
    """Before anything is wrapped, and in the words that `benchbox plan` uses."""
    wanted = cell(**changes)
    with pytest.raises(UnsupportedError, match=because):
        build_session(wanted, build_cell_policy(wanted), [])


def test_a_recipe_whose_library_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine that runs it too, which may lack what the one that planned it has."""
    monkeypatch.setitem(sys.modules, "optimi", None)
    wanted = cell(recipe="bf16_kahan")
    with pytest.raises(UnsupportedError, match=r"needs the module optimi, .*: pip install 'benchbox\[lowbit\]'"):
        build_session(wanted, build_cell_policy(wanted), [])


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU would fail deep inside NCCL; instead the rank without one says what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UnsupportedError, match="rank 1 has no GPU of its own: this machine shows 1; lower world_size"):
        build_cell_policy(cell(backend="ddp", world_size=2))


def test_a_seed_decides_the_weights() -> None:
    """The same on every rank and in every process; another seed gives others."""
    first, again, other = (build_cell_policy(cell(seed=seed)).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
