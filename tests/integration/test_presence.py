"""Blocks of a prefix that a batch may lack, on ranks whose batches differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    folder = tmp_path_factory.mktemp("presence")
    run_ranks(2, RANK_SCRIPTS / "presence.py", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", ["both", "first", "second", "neither", "one each"])
def test_ranks_with_different_data_take_part_in_the_same_collectives(seen: list[dict[str, Any]], case: str) -> None:
    """Sharded, with subgoal images on one rank only: the vision tower is called twice on both, or the other would hang."""
    first, second = (each[case] for each in seen)
    assert first["collectives"] == second["collectives"]
    assert first["loss"] == second["loss"], "the loss is the mean over ranks"


def test_every_decision_travels_in_one_all_reduce(seen: list[dict[str, Any]]) -> None:
    """As many as when nobody has anything optional, whatever the ranks have."""

    def reductions(case: str) -> int:
        return seen[0][case]["collectives"]["all_reduce"]["count"]

    assert {reductions(case) for case in ("both", "first", "second", "neither", "one each")} == {reductions("both")}


def test_a_field_that_one_rank_lacks_is_an_error_on_every_rank_that_names_it(seen: list[dict[str, Any]]) -> None:
    """And not a hang."""
    for each in seen:
        assert each["lacking"] == "the batch lacks what the policy needs: rank 1 has no 'subgoal_mask'"
