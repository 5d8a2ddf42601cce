"""Metrics of several ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.ranks import RANK_SCRIPTS, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def test_a_term_is_the_mean_over_the_samples_of_all_ranks_that_have_it(tmp_path: Path) -> None:
    """Ranks 0, 1 and 2 have 0, 1 and 2 samples with a response: neither rank 0 nor a mean of ranks gives their mean."""
    run_ranks(3, RANK_SCRIPTS / "metrics.py", str(tmp_path / "metrics.jsonl"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["response"] == pytest.approx((1 * 1 + 2 * 2) / 3)
    assert row["flow"] == pytest.approx(2.0)
    assert "memory" not in row, "no sample has one"
    assert row["samples"] == 3 * 2, "of all ranks"
