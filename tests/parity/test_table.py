"""The parity table."""

from __future__ import annotations

import pytest
import torch

from tests.parity.table import ParityTable, read_rows


def test_a_difference_beyond_the_bound_fails_and_is_written(tmp_path):
    table = ParityTable(tmp_path / "rows.jsonl")
    theirs = torch.tensor([1.0, -4.0])
    table.compare("pi0", "peer 1.0", "velocity", theirs + torch.tensor([0.0, 0.004]), theirs, bound=2e-3)
    with pytest.raises(AssertionError, match=r"velocity of pi0 differs by 0\.1 of its magnitude from peer 1\.0"):
        table.compare("pi0", "peer 1.0", "velocity", theirs + torch.tensor([0.4, 0.0]), theirs, bound=2e-3)
    assert [round(row.difference, 6) for row in read_rows(tmp_path / "rows.jsonl")] == [0.001, 0.1]


def test_a_difference_with_a_reason_must_still_exist(tmp_path):
    table = ParityTable(tmp_path / "rows.jsonl")
    theirs = torch.tensor([1.0, -4.0])
    table.compare("pi0", "peer 1.0", "loss", theirs + 0.04, theirs, bound=0.1, reason="masked here")
    with pytest.raises(AssertionError, match=r"loss of pi0 agrees with peer 1\.0, which was not expected: masked here"):
        table.compare("pi0", "peer 1.0", "loss", theirs, theirs, bound=0.1, reason="masked here")
    assert [row.reason for row in read_rows(tmp_path / "rows.jsonl")] == ["masked here", "masked here"]


def test_values_that_are_not_finite_or_of_another_shape_are_never_equal():
    table, theirs = ParityTable(), torch.ones(2)
    with pytest.raises(AssertionError):
        table.compare("pi0", "peer", "loss", torch.tensor([1.0, torch.nan]), theirs)
    with pytest.raises(AssertionError, match=r"\(1,\) against \(2,\)"):
        table.compare("pi0", "peer", "loss", torch.ones(1), theirs)
