"""Random numbers of a training's steps, such as those of dropout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks


def test_every_rank_draws_its_own_numbers_over_the_same_weights(tmp_path: Path) -> None:
    """Sample 1 of every rank would be dropped out alike, and get the same noise."""
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
        run_ranks(2, RANK_SCRIPTS / "seeds.py", str(folder))
    ranks = [json.loads((first / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    for ours, theirs in zip(ranks[0]["draws"], ranks[1]["draws"], strict=True):
        assert ours != theirs
    assert [json.loads((second / f"{rank}.json").read_text()) for rank in range(2)] == ranks, "repeated by the same seed"
