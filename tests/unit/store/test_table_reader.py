"""The tables of a run, read beside its records."""

from __future__ import annotations

import random
from dataclasses import replace

import pandas as pd
import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.errors import RecordError
from benchbox.store.run import RunStore
from benchbox.store.table import LaunchTable
from benchbox.store.table_reader import TableReader
from tests.support.example_run import CELL, OOM, example_record, example_run

RECORDS = [example_record(replace(CELL, seed=seed), launch) for seed in range(200) for launch in (1, 2)]
NAMES = ("table.csv", "table.parquet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    with LaunchTable() as table:
        for record in RECORDS:
            table.add(record)
        table.write(folder)
    return folder


def problems(path, records):
    reader = TableReader(path)
    return [text for record in records for text in reader.differences(record)] + reader.rows_without_record()


@pytest.mark.parametrize("name", NAMES)
def test_records_agree_with_their_rows_in_any_order(folder, name):
    shuffled = random.Random(0).sample(RECORDS, len(RECORDS))
    for records in (RECORDS, RECORDS[::-1], shuffled):
        assert problems(folder / name, records) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message", ["10%\r20%\rdone", "two\nlines", "both\r\n", 'a "quote", a comma', "é"])
def test_an_error_of_any_text_stays_in_its_row(tmp_path, name, message):
    failed = example_record(status="oom", error={**OOM, "message": message})
    with LaunchTable() as table:
        for record in (failed, RECORDS[1]):
            table.add(record)
        table.write(tmp_path)
    assert problems(tmp_path / name, [failed, RECORDS[1]]) == []
    read = pd.read_csv(tmp_path / name) if name.endswith(".csv") else pd.read_parquet(tmp_path / name)
    assert read["error.message"][0] == message
    assert b"\r\n" not in (tmp_path / "table.csv").read_bytes().replace(b'"both\r\n"', b"")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_differs_is_named(folder, name):
    changed = {**RECORDS[7], "status": "oom", "duration_s": RECORDS[7]["duration_s"] + 1}
    texts = problems(folder / name, [*RECORDS[:7], changed, *RECORDS[8:]])
    assert len(texts) == 2
    assert texts[0].startswith(f"status of launch 2 of {changed['cell_id']} is ok, its record has oom")
    assert "duration_s of launch 2" in texts[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_value_is_not_a_value(folder, name):
    """In the row or in the record."""
    with_memory, without = RECORDS[0], {**RECORDS[0], "memory": None}
    assert any("memory" in text or "peak" in text for text in problems(folder / name, [without, *RECORDS[1:]]))
    assert problems(folder / name, [with_memory, *RECORDS[1:]]) == []


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_records_that_have_no_counterpart_are_named(folder, name):
    unknown = example_record(replace(CELL, seed=999), 1)
    texts = problems(folder / name, [unknown, *RECORDS[:-1]])
    assert texts == [
        f"no row of launch 1 of {unknown['cell_id']}",
        f"no record of launch 2 of {RECORDS[-1]['cell_id']}",
    ]


def test_a_row_that_is_there_twice_has_one_record(folder, tmp_path):
    lines = (folder / "table.csv").read_text().splitlines()
    (tmp_path / "table.csv").write_text("\n".join([*lines, lines[3]]))
    assert problems(tmp_path / "table.csv", RECORDS) == [f"no record of launch 1 of {RECORDS[2]['cell_id']}"]


def test_rows_are_read_no_further_than_the_record(folder):
    """Rows that are passed over are kept until their record comes."""
    reader = TableReader(folder / "table.csv")
    reader.differences(RECORDS[0])
    assert not reader._passed
    reader.differences(RECORDS[4])
    assert [*reader._passed] == [(record["cell_id"], record["launch"]) for record in RECORDS[1:4]]


DAMAGES = {
    "another table": ("table.csv", b"a,b\n1,2\n"),
    "no number": ("table.csv", b"cell_id,launch\nx,first\n"),
    "no text": ("table.csv", b"cell_id,launch\n\xff\xfe,1\n"),
    "an open quote": ("table.csv", b'cell_id,launch\n"' + b"x" * 200_000),
    "no parquet": ("table.parquet", b"cell_id,launch\n"),
    "cut": ("table.parquet", None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_no_table_is_one_problem(folder, tmp_path, damage):
    name, content = DAMAGES[damage]
    whole = (folder / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(RecordError, match=rf"{name}: not a table of launches \("):
        problems(tmp_path / name, RECORDS)


def test_a_parquet_file_of_other_columns_is_no_table(tmp_path):
    pd.DataFrame({"launch": [1]}).to_parquet(tmp_path / "table.parquet")
    with pytest.raises(RecordError, match="KeyError: 'cell_id'"):
        problems(tmp_path / "table.parquet", RECORDS)


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_a_damaged_table_once(tmp_path, damage):
    store = RunStore(tmp_path / "run")
    store.write_run(example_run([CELL]))
    for launch in (1, 2):
        store.write_record(example_record(CELL, launch))
    name, content = DAMAGES[damage]
    (store.path / name).write_bytes(b"PAR1" if content is None else content)
    (violation,) = [violation for violation in verify_run(store).violations if name in violation.message]
    assert "not a table of launches" in violation.message
