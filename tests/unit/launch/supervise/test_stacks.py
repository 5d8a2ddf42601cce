"""Stack dumps are read when they are complete."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.job import Job, RankGroup
from benchbox.launch.supervise.stacks import _read_complete, collect_stacks, shorten_files
from benchbox.launch.supervise.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Ranks(RankGroup):
    """Notes what it is asked to send."""

    def __init__(self) -> None:
        self.signalled: list[tuple[list[int], int]] = []

    def signal_ranks(self, pids: Sequence[int], number: int) -> None:
        self.signalled.append((list(pids), number))


def test_only_ranks_that_can_dump_their_stacks_are_asked(tmp_path: Path) -> None:
    """The signal would end any other process: a rank without its stack file has not begun to handle it."""
    job = Job(config={}, ranks=5, folder=tmp_path, timeout_s=None, hang_after_s=1.0)
    alive, done, not_started, elsewhere, importing = traces = [Trace(rank, remote=rank == 3) for rank in range(5)]
    for trace in (alive, done, elsewhere, importing):
        trace.pid = 100 + trace.rank
    done.final_event = "done"
    for trace in (alive, done, not_started, elsewhere):
        job.stack(trace.rank).write_text(OTHER + MAIN)
        job.collectives(trace.rank).touch()
    ranks = Ranks()
    assert collect_stacks(job, ranks, traces) == {0: OTHER + MAIN}
    assert ranks.signalled == [([100], signal.SIGUSR2)]


def test_files_are_named_from_the_folder_of_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of packages, also one in another, the working directory, and benchbox's own; other files stay as they are."""
    packages = Path(pytest.__file__).parents[1]
    monkeypatch.setattr(sys, "path", ["", str(packages.parent), str(packages)])
    monkeypatch.chdir(tmp_path)
    files = {
        packages / "torch" / "nn" / "functional.py": "torch/nn/functional.py",
        tmp_path / "policies" / "mine" / "policy.py": "policies/mine/policy.py",
        Path(sys.modules["benchbox"].__file__ or "").parent / "worker" / "rank.py": "benchbox/worker/rank.py",
        Path("/elsewhere/it s/policy.py"): "/elsewhere/it s/policy.py",
    }
    frame = '  File "{}", line 7, in forward\n    x = "/a/b"\n'
    assert shorten_files("".join(map(frame.format, files))) == "".join(map(frame.format, files.values()))
