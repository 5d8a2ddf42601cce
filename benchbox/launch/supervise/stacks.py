"""Stack dumps of stuck ranks, requested before the group is ended."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.job import Job, RankGroup
    from benchbox.launch.supervise.trace import Trace

_DUMP_LIMIT_S = 2.0
_POLL_S = 0.05


def collect_stacks(job: Job, group: RankGroup, traces: Sequence[Trace]) -> dict[int, str]:
    """Return, by rank, the stacks of all threads of the ranks that have not ended.

    A rank that does not dump its stacks in time, such as a stopped process, is left out, and so are ranks on other nodes.
    """
    # Only a rank that has created its stack file handles SIGUSR2: the signal would end any other.
    alive = [trace for trace in traces if trace.final_event is None and trace.pid is not None and not trace.remote]
    asked = [trace for trace in alive if job.stack(trace.rank).exists()]
    group.signal_ranks([trace.pid for trace in asked if trace.pid is not None], signal.SIGUSR2)
    deadline = time.monotonic() + _DUMP_LIMIT_S
    while time.monotonic() < deadline and not all(job.stack(trace.rank).stat().st_size for trace in asked):
        time.sleep(_POLL_S)
    stacks = {trace.rank: job.stack(trace.rank).read_text(errors="replace") for trace in asked}
    return {rank: stack for rank, stack in stacks.items() if stack}
