"""Measured peaks in the user's cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.errors import RecordError
from benchbox.store.links import MeasuredLinks, read_links, write_links
from benchbox.store.machine_cache import machine_file
from benchbox.store.noise import Noise, NoiseRun, read_noise, write_noise
from benchbox.store.peaks import MeasuredPeaks, read_peaks, write_peaks
from tests.support.peaks import made_up_peaks, rate

REPORTS = Path(__file__).parents[3] / "reports"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_peaks_are_read_as_they_were_written_beside_those_of_other_groups_of_ranks() -> None:
    one, two = made_up_peaks(ranks=1), made_up_peaks(ranks=2)
    write_peaks("a-machine", one)
    write_peaks("a-machine", two)
    assert read_peaks("a-machine") == {"1 cpu rank with 1 thread": one, "2 cpu ranks with 1 thread": two}
    assert read_peaks("another-machine") == {}


@pytest.mark.parametrize("kind", ["peaks", "links", "noise"])
def test_what_a_newer_benchbox_has_added_to_a_measurement_is_ignored(kind: str) -> None:
    links = MeasuredLinks(ranks=2, collectives={}, measured_at="2026-01-01", benchbox_version="9")
    run = NoiseRun(started_at="2026-01-01", launches=10, mean=0.1, sigma=0.01)
    noise = Noise(
        sigma=0.01,
        launches=10,
        ratio=1.0,
        cell="a",
        measured_at="2026-01-01",
        benchbox_version="9",
        runs=(run,),
        other_runs=(run,),
    )
    write_peaks("a-machine", made_up_peaks(ranks=1))
    write_links("a-machine", "gloo", links)
    write_noise("a-machine", "m", noise)
    readers = {"peaks": read_peaks, "links": read_links, "noise": read_noise}
    before = readers[kind]("a-machine")
    file = machine_file(kind, "a-machine")
    content = json.loads(file.read_text())
    (entries,) = (value for value in content.values() if isinstance(value, dict))
    for entry in [*entries.values()]:
        for part in (entry, *entry.get("runs", ()), *entry.get("other_runs", ())):
            part["added_later"] = 1
    file.write_text(json.dumps(content))
    assert readers[kind]("a-machine") == before


def test_peaks_of_a_newer_format_are_not_read_as_if_they_were_of_this_one() -> None:
    path = write_peaks("a-machine", made_up_peaks())
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(RecordError, match="schema version 2; this benchbox reads up to 1: upgrade it"):
        read_peaks("a-machine")


@pytest.mark.parametrize("copy_per_s", [8e9, 12e9])
def test_the_rate_of_memory_is_the_higher_one_so_that_a_bound_is_one(copy_per_s: float) -> None:
    assert replace(made_up_peaks(), copy=rate(copy_per_s)).best_memory == rate(max(copy_per_s, 10e9))


def test_a_damaged_file_is_an_error_with_the_command_that_measures_again() -> None:
    write_peaks("a-machine", made_up_peaks())
    path = machine_file("peaks", "a-machine")
    path.write_text(path.read_text().replace('"threads": 1', '"threads": "one"'))
    with pytest.raises(RecordError, match=r"threads: text, and a whole number is expected.*benchbox doctor --peaks"):
        read_peaks("a-machine")


def test_the_spread_of_peaks_is_that_of_the_rates_that_are_compared_with() -> None:
    """The published peaks of an H200 are uncertain in float16 alone."""
    entry = json.loads((REPORTS / "h200" / "peaks.json").read_text())["groups"]["1 cuda rank"]
    peaks = MeasuredPeaks(**entry)
    assert peaks.uncertainty(["bfloat16"]) is None
    assert peaks.uncertainty(["bfloat16", "float16"]) == "repetitions differ in float16 thin by 43%"
    assert peaks.uncertainty(["bfloat16"]) is None
    assert peaks.uncertainty(["bfloat16", "float16"]) == "repetitions differ in float16 thin by 43%"


@pytest.mark.parametrize(("field", "name"), [("copy", "copy"), ("update", "update in place")])
def test_copies_and_updates_in_place_are_compared_with_whatever_the_dtype(field: str, name: str) -> None:
    peaks = replace(made_up_peaks(), **{field: rate(1e9) | {"spread": 0.2}})
    assert peaks.uncertainty([]) == f"repetitions differ in {name} by 20%"
