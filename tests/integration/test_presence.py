"""Optional blocks of a prefix, on ranks whose batches differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    folder = tmp_path_factory.mktemp("presence")
    run_ranks(2, RANK_SCRIPTS / "presence.py", str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", ["both", "first", "second", "neither", "one each"])
def test_ranks_with_different_data_take_part_in_the_same_collectives(results: list[dict[str, Any]], case: str) -> None:
    """With subgoal images on one rank only, both ranks call the sharded vision tower twice; otherwise one would hang."""
    rank0, rank1 = (result[case] for result in results)
    assert rank0["collectives"] == rank1["collectives"]
    assert rank0["loss"] == rank1["loss"], "the loss is the mean over ranks"


def test_every_decision_travels_in_one_all_reduce(results: list[dict[str, Any]]) -> None:
    """The number of all-reduces does not depend on the optional blocks that the ranks have."""

    def reductions(case: str) -> int:
        return results[0][case]["collectives"]["all_reduce"]["count"]

    assert {reductions(case) for case in ("both", "first", "second", "neither", "one each")} == {reductions("both")}


def test_a_field_that_one_rank_lacks_is_an_error_on_every_rank_that_names_it(results: list[dict[str, Any]]) -> None:
    """Without the shared decision the remaining ranks would hang."""
    for result in results:
        assert result["lacking"] == "the batch lacks what the policy needs: rank 1 has no 'subgoal_mask'"
