"""The chain of digests of a run: what it records, and what it survives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchbox.errors import RecordError
from benchbox.store.chain import content_sha256
from benchbox.store.files import write_json
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, example_record, example_run


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    store.write_record(example_record())
    return store


def kinds(store):
    return [entry["kind"] for entry in store.chain.read()]


def test_a_plan_and_every_record_are_an_entry_and_the_same_plan_is_none_again(store):
    store.write_run(example_run([CELL], created_at="2026-01-02T00:00:00+00:00"))
    store.write_record(example_record(launch=2))
    assert kinds(store) == ["plan", "record", "record"]
    store.write_run(example_run([CELL], reference={}))
    assert kinds(store)[3:] == ["plan"]


def test_a_removed_record_is_an_entry_and_one_that_is_not_there_is_none(store):
    store.remove_record(CELL.cell_id, 1)
    store.remove_record(CELL.cell_id, 1)
    assert kinds(store) == ["plan", "record", "removed"]


def test_a_line_that_was_cut_off_when_the_machine_stopped_is_replaced(store):
    whole = store.chain.path.read_bytes()
    store.chain.path.write_bytes(whole + b'{"kind": "record", "cell_id"')
    assert store.chain.defect() is None
    store.write_record(example_record(launch=2))
    assert store.chain.path.read_bytes().startswith(whole)
    assert kinds(store) == ["plan", "record", "record"]


def test_a_chain_is_read_as_often_as_it_is_iterated_over(store):
    reader = store.chain.read()
    assert [*reader] == [*reader]
    digests = [json.loads(line)["digest"] for line in store.chain.path.read_text().splitlines()]
    assert len(digests) == 2
    assert (reader.head, reader.defect) == (digests[-1], None)


def test_without_a_chain_there_are_no_entries_and_no_head(store):
    store.chain.path.unlink()
    assert ([*store.chain.read()], store.chain.head(), store.chain.defect()) == ([], None, None)
    assert store.chain.sha256_by_launch() == {}


@pytest.mark.parametrize("line", ["[]", "{}", "nonsense", '{"kind": "record", "digest": "0"}'])
def test_a_line_that_is_no_entry_is_a_defect_and_no_traceback(store, line):
    store.chain.path.write_text(store.chain.path.read_text() + line + "\n")
    assert store.chain.defect() == "line 3 does not follow: it or a line before it was edited or removed"
    assert store.chain.sha256_by_launch() == {}


def test_the_digest_of_a_record_does_not_depend_on_its_layout(store):
    path = store.record_path(CELL.cell_id, 1)
    record = json.loads(path.read_text())
    write_json(path, dict(reversed(record.items())), indent=None)
    assert store.chain.sha256_by_launch() == {(CELL.cell_id, 1): content_sha256(json.loads(path.read_text()))}


def test_an_entry_is_on_disk_before_the_record_that_it_describes(store, monkeypatch):
    flush, synced = os.fsync, []

    def note(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store.write_record(example_record(launch=2))
    entry, record = synced
    assert entry == "chain.jsonl"
    assert record.startswith(".launch-2.json.")


def test_a_plan_that_was_there_before_another_one_is_an_entry_again(store):
    """An order of verification: the last plan of the chain is the one in force."""
    store.write_run(example_run([CELL], reference={}))
    store.write_run(example_run([CELL]))
    assert kinds(store) == ["plan", "record", "plan", "plan"]


@pytest.mark.parametrize("line", ["garbage", "[1]", "{}", "[" * 100_000, "\udcff"])
def test_nothing_is_appended_to_a_last_line_that_is_no_entry(store, line):
    path = store.path / "chain.jsonl"
    text = path.read_bytes() + line.encode(errors="surrogateescape") + b"\n"
    path.write_bytes(text)
    with pytest.raises(RecordError, match=r"chain\.jsonl: the last line is no entry of a chain; remove it, or"):
        store.write_record(example_record(launch=2))
    assert path.read_bytes() == text
