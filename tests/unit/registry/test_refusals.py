"""Cells that are refused for their fields, whatever their backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.errors import UnsupportedError
from benchbox.plan import plan
from benchbox.registry.backends import backends
from benchbox.registry.refusals import cell_refusal
from benchbox.session.build import build_cell_policy, build_session
from benchbox.spec.matrix import Matrix
from tests.support.ranks import tiny_cell

EXCLUSIVE = [
    (
        {"attention": "flex", "padding": "longest"},
        "FlexAttention is compiled for every length of a batch, unseen: write padding: full, or attention: sdpa",
    ),
    (
        {"compile": "model", "checkpointing": True},
        "a policy that is compiled as a whole recomputes inside its graph, unseen: write compile: blocks",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), EXCLUSIVE)
def test_fields_that_exclude_one_another_are_refused_in_the_same_words_by_plan_and_session(changes, reason):
    """A session is also built where nothing was planned, as in Python."""
    cell = tiny_cell(backend="single", world_size=1, **changes)
    assert cell_refusal(cell) == reason
    fixed = {name: getattr(cell, name) for name in ("policy", "size", "backend", "world_size", "batch", *changes)}
    (skip,) = plan(Matrix(name="m", path=Path("m.yaml"), scalars=fixed, axes=())).skipped
    assert skip.reason == reason
    runnable = tiny_cell(backend="single", world_size=1)
    with pytest.raises(UnsupportedError, match=reason):
        build_session(cell, build_cell_policy(runnable), [])


@pytest.mark.parametrize(("changes", "reason"), EXCLUSIVE)
def test_no_backend_has_an_opinion_on_them_and_each_field_alone_is_accepted(changes, reason):
    for name, info in backends().items():
        if info.checkpointing and not info.hybrid:
            cell = tiny_cell(backend=name, world_size=info.min_ranks, recipe="fp32", **changes)
            assert info.refusal(cell) is None
            assert cell_refusal(cell) == reason
    for field, value in changes.items():
        assert cell_refusal(tiny_cell(**{field: value})) is None


def test_the_refusal_of_a_backend_is_that_of_the_cell():
    cell = tiny_cell(backend="zero3", recipe="fp32", checkpointing=True, compile="model")
    assert cell_refusal(cell) == backends()["zero3"].refusal(cell)
    assert "zero3 refuses activation checkpointing" in str(cell_refusal(cell))
