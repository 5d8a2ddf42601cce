"""Run directories: written atomically, read with errors that name the file."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from benchbox.errors import EXIT_USAGE, ConfigurationError, RecordError
from benchbox.store.baseline import Baseline, read_baseline, write_baseline
from benchbox.store.files import write_text
from benchbox.store.run import RunStore
from benchbox.store.table import LaunchTable, launch_table
from tests.support.example_run import CELL, example_record, example_run, write_example
from tests.support.host_states import busy_state, quiet_state


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path / "run")
    store.write_run(example_run([CELL]))
    return store


def test_a_run_and_its_records_are_read_back_as_written(store):
    record = example_record()
    store.write_record(record)
    assert store.run() == example_run([CELL], created_at=store.run().created_at)
    assert list(store.records()) == [record]
    assert store.record(CELL.cell_id, 1) == record
    assert store.record(CELL.cell_id, 2) is None


def test_records_come_in_the_order_of_the_plan_then_by_launch(tmp_path):
    cells = [replace(CELL, batch=batch) for batch in (3, 1, 2)]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells))
    for launch in (10, 2, 1):
        for cell in cells:
            store.write_record(example_record(cell, launch))
    order = [(record["cell"]["batch"], record["launch"]) for record in store.records()]
    assert order == [(batch, launch) for batch in (3, 1, 2) for launch in (1, 2, 10)]


def test_cells_that_are_no_longer_planned_are_not_part_of_the_run(store):
    store.write_record(example_record())
    store.write_run(example_run([replace(CELL, batch=7)]))
    assert list(store.records()) == []


def test_logs_and_events_of_a_launch_are_not_mistaken_for_records(store):
    store.write_record(example_record())
    folder = store.launch_dir(CELL.cell_id, 1)
    folder.mkdir()
    (folder / "rank0.json").write_text("{}")
    assert len(list(store.records())) == 1


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_text(path, "old")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_character_is_written_as_an_escape(tmp_path):
    """Bytes of a path that are not UTF-8 are kept by Python as halves of pairs of UTF-16."""
    write_text(tmp_path / "report.md", os.fsdecode(b"caf\xe9 \xc3\xa9"))
    assert (tmp_path / "report.md").read_text() == r"caf\udce9 é"


def test_a_record_has_no_number_that_is_not_json(store):
    store.write_record(example_record() | {"loss": [1.0, float("nan"), float("inf")]})
    text = store.record_path(CELL.cell_id, 1).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == [1.0, None, None]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not whole JSON"),
        (lambda text: "", "empty"),
        (lambda text: "[1]", "a JSON list"),
        (lambda text: "{}", "no schema_version, so not written by benchbox"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 2'), "schema version 2; .* upgrade it"),
        (lambda text: text.replace('"loss"', '"lost"'), "missing loss"),
        (lambda text: text.replace('"status": "ok"', '"status": "fine"'), "unknown status 'fine'"),
        (lambda text: text.replace('"launch": 1', '"launch": 2'), "moved or copied here"),
        (lambda text: "\udcff", "not text"),
        (lambda text: "[" * 200_000, "nested too deeply, or with a number of too many digits"),
        (lambda text: '{"loss": ' + "9" * 5000 + "}", "nested too deeply, or with a number of too many digits"),
    ],
)
def test_a_damaged_record_is_one_line_that_names_the_file_and_what_is_wrong(store, damage, message):
    path = store.write_record(example_record())
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(RecordError, match=message) as caught:
        list(store.records())
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_folder_that_is_not_a_run_is_refused_with_the_remedy(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RecordError, match="`benchbox run MATRIX` makes one"):
            RunStore(path).run()


def test_a_file_is_not_said_to_be_absent_where_a_run_directory_is_wanted(tmp_path):
    file = tmp_path / "matrix.yaml"
    file.touch()
    with pytest.raises(RecordError) as caught:
        RunStore(file).run()
    assert str(caught.value) == f"{file}: a file, not a run directory; `benchbox run MATRIX` makes one"


@pytest.mark.parametrize("change", [{"cells": 3}, {"measure": {}}, {"measure": {"launches": 0}}])
def test_a_damaged_run_file_is_refused(store, change):
    path = store.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RecordError, match=r"run\.json: not what benchbox writes"):
        store.run()


def test_a_matrix_that_may_not_be_looked_at_is_as_one_that_is_not_here(tmp_path, monkeypatch):
    """A run of a colleague, whose matrix is in a folder of their own."""
    run = example_run([CELL], matrix_file=str(tmp_path / "m.yaml"))
    assert run.matrix_path is None
    (tmp_path / "m.yaml").write_text("name: example\n")
    assert run.matrix_path == tmp_path / "m.yaml"

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert run.matrix_path is None


def test_the_table_has_one_row_a_launch_and_survives_parquet_and_csv(tmp_path):
    records = list(write_example(tmp_path).records())
    frame = launch_table(records)
    assert len(frame) == len(records) == 15
    failed = frame[frame["status"] == "oom"].iloc[0]
    assert failed["error.type"] == "OutOfMemoryError"
    assert pd.isna(failed["step_time_s"])
    with LaunchTable() as table:
        for record in records:
            table.add(record)
        csv, parquet = table.write(tmp_path)
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), frame)
    again = pd.read_csv(csv, float_precision="round_trip")  # the default of pandas 2 rounds
    assert again["global_samples_per_s"].tolist()[0] == records[0]["throughput"]["global_samples_per_s"]
    assert frame["peak_reserved_bytes"].isna().all()
    assert pd.read_parquet(parquet)["peak_reserved_bytes"].dtype == "Float64"


def test_a_field_that_some_cells_lack_is_missing_in_their_rows():
    """Records of an earlier version lack the fields that were added since."""
    later = example_record(launch=2)
    later["cell"] = {**later["cell"], "added": 7}
    frame = launch_table([example_record(launch=1), later, example_record(launch=3)])
    assert frame["added"].isna().tolist() == [True, False, True]
    assert frame["added"][1] == 7


def test_a_column_has_the_type_of_its_values_and_text_for_values_of_several_kinds(tmp_path):
    added = [{"count": 1, "share": 1, "flag": True, "either": 2, "none": None}, {"share": 0.5, "either": "two", "count": None}]
    records = [example_record(launch=number) for number in (1, 2)]
    for record, fields in zip(records, added, strict=True):
        record["cell"] = {**record["cell"], **fields}
    frame = launch_table(records)
    assert frame[[*added[0]]].dtypes.astype(str).to_dict() == {
        "count": "Int64",
        "share": "Float64",
        "flag": "boolean",
        "either": "string",
        "none": "string",
    }
    assert frame["share"].tolist() == [1.0, 0.5]
    assert frame["either"].tolist() == ["2", "two"]
    assert frame["count"].isna().tolist() == frame["flag"].isna().tolist() == [False, True]


def test_a_table_of_more_rows_than_a_group_and_than_fit_in_memory_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.store.table._GROUP_ROWS", 4)
    monkeypatch.setattr("benchbox.store.table._SPOOLED_BYTES", 1000)
    with LaunchTable() as table:
        for number in range(1, 11):
            table.add(example_record(launch=number))
        csv, parquet = table.write(tmp_path)
        table.add(example_record(launch=11))
        assert table.frame()["launch"].tolist() == [*range(1, 12)], "rows can be added after it was written"
    file = pq.ParquetFile(parquet)
    assert [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)] == [4, 4, 2]
    assert file.read(["launch"])["launch"].to_pylist() == pd.read_csv(csv)["launch"].tolist() == [*range(1, 11)]


def test_the_busiest_host_of_a_launch_is_in_its_row():
    quiet, busy = quiet_state(), busy_state()
    states = [quiet | {"hosts": [*first["hosts"], *second["hosts"]]} for first, second in ((quiet, busy), (busy, quiet))]
    frame = launch_table([example_record(launch=number) | {"host": state} for number, state in enumerate(states, start=1)])
    assert frame["host.other_cpu_share"].tolist() == [busy["hosts"][0]["other_cpu_share"]] * 2
    without = launch_table([example_record() | {"host": None}])
    assert set(frame) - set(without) == {"host.busy", "host.other_cpu_share", "host.energy_j_per_sample"}


def test_a_text_that_is_not_unicode_is_in_the_table_with_an_escape(store, tmp_path):
    """A file whose name is not UTF-8 was not found, as a launch's error says."""
    error = {
        "type": "FileNotFoundError",
        "message": "no such file: caf\udce9.json",
        "rank": 0,
        "phase": None,
        "traceback": None,
    }
    store.write_record(example_record(status="crash", error=error))
    with LaunchTable() as table:
        for record in store.records():
            table.add(record)
        csv, parquet = table.write(tmp_path)
    for frame in (pd.read_csv(csv), pd.read_parquet(parquet)):
        assert list(frame["error.message"]) == ["no such file: caf\\udce9.json"]


def test_a_run_without_records_has_an_empty_table(tmp_path):
    with LaunchTable() as table:
        csv, parquet = table.write(tmp_path)
    assert csv.exists()
    assert len(pd.read_parquet(parquet)) == 0


def test_a_baseline_is_read_back_as_written_and_something_else_is_refused(tmp_path):
    baseline = Baseline(
        machine="m",
        matrix="x",
        promoted_at="now",
        benchbox_version="0",
        measure={},
        environment={},
        cells={
            "abc": {"cell": {}, "values": {"step_time_s": {"value": 0.5, "low": 0.4, "high": 0.6, "launches": 3}, "mfu": None}}
        },
    )
    path = tmp_path / "m" / "x.json"
    write_baseline(path, baseline)
    assert read_baseline(path) == baseline
    assert (baseline.value("abc", "step_time_s"), baseline.value("abc", "mfu"), baseline.value("abd", "mfu")) == (
        0.5,
        None,
        None,
    )
    path.write_text('{"schema_version": 1}')
    with pytest.raises(RecordError, match="not a baseline"):
        read_baseline(path)


def test_the_plan_of_a_run_of_another_name_is_not_replaced(tmp_path):
    """Example: `benchbox noise --out runs/example`, whose plan has one cell and no reference."""
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    plan = (tmp_path / "run.json").read_text()
    with pytest.raises(ConfigurationError, match="holds the run example, whose plan example-noise would replace"):
        store.write_run(example_run([CELL], name="example-noise"))
    assert (tmp_path / "run.json").read_text() == plan
    store.write_run(example_run([CELL], reference={}))
    (tmp_path / "run.json").write_text("{")
    store.write_run(example_run([CELL], name="example-noise"))
    assert store.run().name == "example-noise"
