"""Stack dumps of stuck ranks, and their last collectives, requested before the group is ended; files in tracebacks."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import benchbox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.launch.job import Job, RankGroup
    from benchbox.launch.supervise.trace import Trace

_DUMP_LIMIT_S = 5.0
_COLLECTIVES_LIMIT_S = 3.0  # a rank looks once a second whether it has been asked
_POLL_S = 0.05
_SETTLED_S = 0.2  # without growth of a dump, after which it is complete
# faulthandler writes the threads one by one, and that which received the signal, the main thread, as the last.
_LAST_THREAD = "Current thread 0x"
_FILE = re.compile(r'(?<=File ")/[^"\n]+(?=")')


def collect_stacks(job: Job, group: RankGroup, traces: Sequence[Trace]) -> dict[int, str]:
    """Return, by rank, the stacks of all threads of the ranks that have not ended, once they also wrote their collectives.

    A rank that does not dump its stacks in time, such as a stopped process, is left out, and so are ranks on other nodes.
    """
    # Only a rank that has created its stack file handles SIGUSR2: the signal would end any other.
    alive = [trace for trace in traces if trace.final_event is None and trace.pid is not None and not trace.remote]
    asked = [trace for trace in alive if job.stack(trace.rank).exists()]
    group.signal_ranks([trace.pid for trace in asked if trace.pid is not None], signal.SIGUSR2)
    stacks = _read_complete({trace.rank: job.stack(trace.rank) for trace in asked})
    stacks = {rank: stack for rank, stack in stacks.items() if stack}
    deadline = time.monotonic() + _COLLECTIVES_LIMIT_S
    while time.monotonic() < deadline and not all(job.collectives(rank).exists() for rank in stacks):
        time.sleep(_POLL_S)
    return stacks


def _read_complete(files: Mapping[int, Path]) -> dict[int, str]:
    """Return the dumps by rank once they are complete; what there is of them when the time is up."""
    stacks: dict[int, str] = {}
    now = grown = time.monotonic()
    deadline = now + _DUMP_LIMIT_S
    while now < deadline:
        latest = {rank: file.read_text(errors="replace") for rank, file in files.items()}
        now = time.monotonic()
        if latest != stacks:
            stacks, grown = latest, now
        if all(_LAST_THREAD in stack for stack in stacks.values()) and now - grown >= _SETTLED_S:
            break
        time.sleep(_POLL_S)
    return stacks


def shorten_files(traceback: str | None) -> str | None:
    """Return a traceback whose files are named from the folder they are imported from, or from the working directory.

    Records are published: `torch/nn/modules/module.py` names the file, and its absolute path whoever measured.
    """
    if traceback is None:
        return None
    folders = {Path(benchbox.__file__).parents[1], Path.cwd(), *map(Path, filter(None, sys.path))}

    def shorten(match: re.Match[str]) -> str:
        file = Path(match[0])
        names = [str(file.relative_to(folder)) for folder in folders if file.is_relative_to(folder)]
        return min(names, key=len, default=match[0])

    return _FILE.sub(shorten, traceback)
