"""Measured peaks in the user's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchbox.errors import RecordError
from benchbox.store.machine_cache import machine_file
from benchbox.store.peaks import read_peaks, write_peaks
from tests.support.peaks import made_up_peaks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_peaks_are_read_as_they_were_written_beside_those_of_other_groups_of_ranks() -> None:
    one, two = made_up_peaks(ranks=1), made_up_peaks(ranks=2)
    write_peaks("a-machine", one)
    write_peaks("a-machine", two)
    assert read_peaks("a-machine") == {"1 cpu rank with 1 thread": one, "2 cpu ranks with 1 thread": two}
    assert read_peaks("another-machine") == {}


def test_a_damaged_file_is_an_error_with_the_command_that_measures_again() -> None:
    write_peaks("a-machine", made_up_peaks())
    path = machine_file("peaks", "a-machine")
    path.write_text(path.read_text().replace('"threads": 1', '"threads": "one"'))
    with pytest.raises(RecordError, match=r"threads: text, and a whole number is expected.*benchbox doctor --peaks"):
        read_peaks("a-machine")
