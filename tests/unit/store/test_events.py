"""Event files that are read while they are written."""

from __future__ import annotations

import json
import subprocess
import sys
from threading import Thread

import pytest

from benchbox.errors import RecordError
from benchbox.store.events import EventWriter, read_events


def test_events_are_read_back_with_rank_and_time(tmp_path):
    writer = EventWriter(tmp_path / "launch-1" / "events-rank3.jsonl", rank=3)
    writer.write("progress", stage="measure", step=2, of=10, phase=None)
    events, _ = read_events(tmp_path / "launch-1" / "events-rank3.jsonl")
    assert [{**event, "t": None, "monotonic_s": None} for event in events] == [
        {"t": None, "monotonic_s": None, "rank": 3, "event": "progress", "stage": "measure", "step": 2, "of": 10, "phase": None}
    ]
    assert events[0]["t"] > 1.7e9


def test_an_event_of_which_a_full_disk_takes_a_part_is_not_in_the_file_and_later_ones_are(tmp_path):
    """A limit of the file's size, in a process of its own, acts like a full disk: it takes a part of a line."""
    path = tmp_path / "events.jsonl"
    script = (
        "import resource, signal, sys; from pathlib import Path; from benchbox.store.events import EventWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "writer = EventWriter(Path(sys.argv[1]), 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))\n"
        "try: writer.write('progress', text='x' * 400)\n"
        "except OSError as error: print(error.strerror)\n"
        "try: writer.write_last('x' * 400)\n"
        "except OSError as error: print(error.strerror)\n"
        "writer.write('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "No space left on device\n" * 2
    assert [event["event"] for event in read_events(path)[0]] == ["done"]


def test_reading_goes_on_where_it_stopped_and_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, 0)
    writer.write("start", pid=1)
    earlier, offset = read_events(path)
    with path.open("ab") as stream:
        stream.write(b'{"event": "pro')
    assert read_events(path, offset) == ([], offset)
    with path.open("ab") as stream:
        stream.write(b'gress"}\n')
    writer.write("done")
    later, offset = read_events(path, offset)
    assert [event["event"] for event in earlier + later] == ["start", "progress", "done"]
    assert read_events(path, offset) == ([], path.stat().st_size)


def test_a_file_that_does_not_exist_yet_has_no_events(tmp_path):
    assert read_events(tmp_path / "events.jsonl") == ([], 0)


def test_a_damaged_line_is_named_by_file_and_byte(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "start"}\nnot an event\n')
    with pytest.raises(RecordError, match=r"events\.jsonl: the line at byte 19 is not an event"):
        read_events(path)


def test_threads_of_a_rank_never_write_into_each_others_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, 0)
    threads = [Thread(target=lambda: [writer.write("heartbeat", filler="x" * 500) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_events(path)[0]) == 800


def test_a_heartbeat_that_comes_after_the_last_event_is_dropped(tmp_path):
    """A rank is done before the thread of its heartbeats ends, and `benchbox verify` expects the last event to be `done`."""
    writer = EventWriter(tmp_path / "events.jsonl", 0)
    writer.write("heartbeat", stage="measure")
    writer.write_last("done")
    writer.write("heartbeat", stage="measure")
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")[0]] == ["heartbeat", "done"]


def test_numbers_that_json_cannot_represent_are_null_and_other_objects_are_text(tmp_path):
    path = tmp_path / "events.jsonl"
    EventWriter(path, 0).write("error", value=float("nan"), where=tmp_path)
    line = path.read_text()
    assert "NaN" not in line
    assert json.loads(line)["where"] == str(tmp_path)
