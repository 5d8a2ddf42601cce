"""The table of launches, of records that are no longer what a launch wrote."""

from __future__ import annotations

import pytest

from benchbox.errors import RecordError
from benchbox.store.table import launch_table
from tests.support.example_run import example_record


@pytest.mark.parametrize("peak", [2**53 + 1, 2**63])
def test_a_number_that_no_table_holds_is_named_by_its_column(peak) -> None:
    record = example_record()
    record["memory"]["worst"] |= {"allocated_peak_bytes": peak}
    with pytest.raises(RecordError, match=r"^peak_allocated_bytes: a number that no launch can have \("):
        launch_table([record])
