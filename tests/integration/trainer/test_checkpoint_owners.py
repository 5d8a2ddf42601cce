"""Replicas copy what they write of a checkpoint, and not all that they hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks


def test_each_part_is_of_one_rank_of_those_that_hold_it_also_once_one_of_them_holds_more(tmp_path: Path) -> None:
    """Ranks write about as many bytes: 100 elements are as much as 40 and 50 together."""
    run_ranks(2, RANK_SCRIPTS / "checkpoint_owners.py", str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == [["generator/0", "large", "sharded"]] * 3
    others = ["generator/1", "sharded", "small", "smaller"]
    assert second == [others, others, sorted([*others, "late"])]
