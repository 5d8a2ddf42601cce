"""Times that several ranks take together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchbox.measure.links import COLLECTIVES
from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks


def test_times_are_those_of_the_slowest_rank_on_every_rank(tmp_path: Path) -> None:
    """A call takes one second on rank 0 and two on rank 1."""
    run_ranks(2, RANK_SCRIPTS / "slowest_rank.py", str(tmp_path))
    rates = {"copy": 2 * 64 / 2, "update": 2 * 64 / 2, "all_reduce": 64 / 2}
    expected = {"links": {name: [[64, 2.0]] for name in COLLECTIVES}, "data_wait_s": 2.0, **rates}
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
