"""Metrics of several ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics")
    run_ranks(3, RANK_SCRIPTS / "metrics.py", str(folder))
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_term_is_the_mean_over_the_samples_of_all_ranks_that_have_it(folder: Path) -> None:
    """Ranks 0, 1 and 2 have 0, 1 and 2 samples with a response: neither rank 0 nor a mean of ranks gives their mean."""
    (row,) = rows(folder / "metrics.jsonl")
    assert row["response"] == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert row["flow"] == pytest.approx(2.0)
    assert "memory" not in row, "no sample has one"
    assert row["samples"] == 3 * 2, "of all ranks"


def test_a_term_does_not_depend_on_the_steps_that_are_logged_with_its_step(folder: Path) -> None:
    """A resumed training has other blocks, and the same terms bit for bit."""
    alone, together = ([(row["flow"], row["response"]) for row in rows(folder / f"blocks-{block}.jsonl")] for block in (1, 5))
    assert alone == together
