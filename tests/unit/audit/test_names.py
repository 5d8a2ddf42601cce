"""Folding of tensor names."""

from __future__ import annotations

import pytest

from benchbox.audit.names import fold_names


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([f"blocks.{i}.norm.weight" for i in range(12)], ["blocks.0-11.norm.weight"]),
        ([f"blocks.{i}.{leaf}" for i in range(2) for leaf in ("a", "b", "c")] + ["head"], ["blocks.0-1.*", "head"]),
        ([f"blocks.{i}.{leaf}" for i in range(2) for leaf in ("a", "b")], ["blocks.0-1.a", "blocks.0-1.b"]),
        (["a.0.w", "a.2.w", "a.3.w"], ["a.{0,2,3}.w"]),
        ([f"a.{i}.b.{j}.w" for i in range(2) for j in range(3)], ["a.0-1.b.0-2.w"]),
        (["a.0.b.0.w", "a.1.b.1.w"], ["a.0.b.0.w", "a.1.b.1.w"]),
        (["head.weight", "head.bias"], ["head.weight", "head.bias"]),
        (["w", "w"], ["w"]),
        ([], []),
    ],
    ids=["a range", "all of a block", "two of a block", "gaps", "two numbers", "no product", "no numbers", "twice", "none"],
)
def test_folded_names_stand_for_the_same_tensors(names: list[str], folded: list[str]) -> None:
    assert fold_names(names) == folded
