"""Event files of a rank that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchbox.store.events import read_events


def test_a_rank_killed_while_writing_leaves_whole_events(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from benchbox.store.events import EventWriter\n"
        "writer = EventWriter(Path(sys.argv[1]), 0)\nprint('ready', flush=True)\n"
        "while True: writer.write('heartbeat', filler='x' * 3000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while not path.exists() or path.stat().st_size < 100_000:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    events, offset = read_events(path)
    assert len(events) > 30
    assert path.stat().st_size - offset < 3100
