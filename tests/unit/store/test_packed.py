"""A published run: all records in one Parquet file instead of one JSON file per launch."""

from __future__ import annotations

import json
import pickle
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchbox.errors import EXIT_USAGE, RecordError
from benchbox.report import write_reports
from benchbox.store.packed import read_packed, write_packed
from benchbox.store.predictions import FILE as PREDICTIONS
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, OOM, example_record, example_run, write_example

REPORTS = ("report.html", "report.md", "table.csv", "table.parquet")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run and the same run published, which tests copy."""
    folder = tmp_path_factory.mktemp("runs")
    write_reports(write_example(folder / "run").path, folder / "published", pack=True)
    return folder


@pytest.fixture
def example(runs, tmp_path):
    return RunStore(shutil.copytree(runs / "run", tmp_path / "run"))


@pytest.fixture
def packed(runs, tmp_path):
    return RunStore(shutil.copytree(runs / "published", tmp_path / "published"))


def test_a_published_run_is_read_like_the_original(example, packed):
    assert not (packed.path / "cells").exists()
    assert packed.run() == example.run()
    records = list(example.records())
    assert list(packed.records()) == records
    assert packed.record(records[0]["cell_id"], 1) == records[0]
    assert packed.record(records[0]["cell_id"], 9) is None


def test_its_reports_are_byte_identical_and_it_can_be_published_again(example, packed, tmp_path):
    write_reports(example.path)
    write_reports(packed.path, tmp_path / "again", pack=True)
    for name in REPORTS:
        original = (example.path / name).read_bytes()
        assert (packed.path / name).read_bytes() == original
        assert (tmp_path / "again" / name).read_bytes() == original
    for name in ("run.json", "records.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (packed.path / name).read_bytes()


def test_predictions_of_an_earlier_publication_are_removed_by_a_run_without_any(example, packed):
    (packed.path / PREDICTIONS).write_text("{}")
    example.publish(packed.path)
    assert not (packed.path / PREDICTIONS).exists()


def test_the_chain_of_an_earlier_publication_is_removed_by_a_run_without_one(example, packed):
    example.chain.path.unlink()
    example.publish(packed.path)
    assert not packed.chain.exists()


def test_numbers_nulls_text_and_the_order_of_keys_round_trip_exactly(tmp_path):
    record = example_record() | {"loss": [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, None, float("nan"), float("inf"), 1]}
    record["environment"] = {"z": 2**63 + 1, "a": None, "text": "\u00e9\ud800\n\x00", "nested": {"b": [], "a": {}}, "": True}
    write_packed(tmp_path / "records.parquet", [record])
    (restored,) = read_packed(tmp_path / "records.parquet")
    # Texts are compared because NaN differs from itself, and because dictionaries of another order are equal.
    assert json.dumps(restored) == json.dumps(record)
    assert list(restored) == list(record)


def test_records_come_in_the_order_of_the_plan_then_by_launch_and_only_of_planned_cells(tmp_path):
    unplanned, planned = example_record(launch=1) | {"cell_id": "f" * 12}, [example_record(launch=n) for n in (10, 2, 1)]
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    write_packed(tmp_path / "records.parquet", [unplanned, *planned])
    assert [record["launch"] for record in store.records()] == [1, 2, 10]


def test_records_are_written_and_read_in_groups(example, tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.store.packed._GROUP_ROWS", 4)
    path, records = tmp_path / "records.parquet", list(example.records())
    write_packed(path, iter(records))
    footer = pq.ParquetFile(path).metadata
    assert [footer.row_group(group).num_rows for group in range(footer.num_row_groups)] == [4, 4, 4, 3]
    assert list(read_packed(path)) == records


def test_records_in_cells_take_precedence_over_packed_ones(packed):
    oldest = next(packed.records())
    newer = oldest | {"duration_s": 99.0}
    packed.write_record(newer)
    assert list(RunStore(packed.path).records()) == [newer]
    shutil.rmtree(packed.path / "cells")
    assert next(RunStore(packed.path).records()) == oldest


def test_a_published_run_is_not_run_again_in_its_place(packed):
    with pytest.raises(RecordError, match=r"a published run .* choose another directory: --out DIR"):
        packed.write_run(example_run([CELL]))


def test_a_run_is_not_published_into_one_whose_records_would_hide_it(example, tmp_path):
    occupied = write_example(tmp_path / "occupied", policy="another")
    with pytest.raises(RecordError, match="its cells/ would hide the packed records"):
        write_reports(example.path, occupied.path, pack=True)
    assert occupied.run().matrix["policy"] == "another"


def test_a_run_can_be_packed_in_its_own_folder(example):
    records = list(example.records())
    write_reports(example.path, pack=True)
    shutil.rmtree(example.path / "cells")
    assert list(RunStore(example.path).records()) == records


def foreign_table(columns):
    return lambda path: pq.write_table(pa.table(columns), path)


def packed_row(**changes):
    record = example_record()
    row = {"cell_id": CELL.cell_id, "launch": 1, "status": "ok", "record": json.dumps(record)} | changes
    return foreign_table({key: [value] for key, value in row.items()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "cannot be read as Parquet"),
        (lambda path: path.write_bytes(b""), "cannot be read as Parquet"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "cannot be read as Parquet"),
        (
            lambda path: path.write_bytes(b"PAR1" + path.read_bytes()[4:2000][::-1] + path.read_bytes()[2000:]),
            "cannot be read as Parquet",
        ),
        (foreign_table({"a\nb": [1]}), r"not records of benchbox: its columns are 'a\\nb' int64;"),
        (packed_row(record="{"), "row 1: the record is not JSON"),
        (packed_row(record=3), "not records of benchbox: its columns are .* 'record' int64;"),
        (packed_row(cell_id=[CELL.cell_id]), "not records of benchbox"),
        (foreign_table({}), "not records of benchbox"),
        (packed_row(record="[1]"), "row 1: the record is a JSON list"),
        (packed_row(record="{}"), "row 1: no schema_version"),
        (packed_row(status="oom"), "row 1: the record has status 'ok', and its row 'oom'"),
        (packed_row(launch=2), "row 1: the record has launch 1, and its row 2"),
        (lambda path: write_packed(path, [example_record(), example_record()]), "row 2: launch 1 of cell .* is there twice"),
    ],
)
def test_a_damaged_or_foreign_file_is_one_line_that_names_it(packed, damage, message):
    path = packed.path / "records.parquet"
    damage(path)
    with pytest.raises(RecordError, match=message) as caught:
        list(RunStore(packed.path).records())
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "records.parquet"
    write_packed(path, [example_record()])
    content = path.read_bytes()
    monkeypatch.setattr(
        "pyarrow.parquet.ParquetWriter.write_table", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space"):
        write_packed(path, [example_record(status="oom", error=OOM)])
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_flipped_byte_never_changes_a_number_unnoticed(packed):
    path = packed.path / "records.parquet"
    content, records = path.read_bytes(), list(read_packed(path))
    for position in range(0, len(content), 37):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0b101]) + content[position + 1 :])
        try:
            restored = list(read_packed(path))
        except RecordError:
            continue
        assert restored == records, position
