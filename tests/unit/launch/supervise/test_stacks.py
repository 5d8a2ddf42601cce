"""Stack dumps are read when they are complete."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from benchbox.launch.supervise.stacks import _read_complete

if TYPE_CHECKING:
    from pathlib import Path

OTHER = 'Thread 0x00007f2e810f66c0 (most recent call first):\n  File "threading.py", line 629 in wait\n\n'
MAIN = 'Current thread 0x00007f2e9af2d740 (most recent call first):\n  File "policy.py", line 12 in forward\n'


def test_a_dump_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    """The main thread comes last, and a rank on a busy machine may pause before it."""
    files = {rank: tmp_path / f"stack-rank{rank}.txt" for rank in (0, 1)}
    files[0].write_text(OTHER + MAIN)
    files[1].write_text(OTHER)

    def write_the_rest() -> None:
        time.sleep(0.5)
        with files[1].open("a") as stream:
            stream.write(MAIN)

    writer = threading.Thread(target=write_the_rest)
    writer.start()
    stacks = _read_complete(files)
    writer.join()
    assert stacks == {0: OTHER + MAIN, 1: OTHER + MAIN}


def test_a_rank_that_writes_nothing_is_not_waited_for_without_end(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"stack-rank{rank}.txt" for rank in (0, 1)}
    files[0].write_text(OTHER + MAIN)
    files[1].touch()
    assert _read_complete(files) == {0: OTHER + MAIN, 1: ""}
