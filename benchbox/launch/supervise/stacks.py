"""What stuck ranks are doing: each is asked for its stack before the group is ended."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.job import Job, RankGroup
    from benchbox.launch.supervise.trace import Trace

_ANSWER_LIMIT_S = 2.0
_POLL_S = 0.05


def ask_for_stacks(job: Job, group: RankGroup, traces: Sequence[Trace]) -> dict[int, str]:
    """The stacks of all threads of every rank that has not ended and answers, by rank. A stopped process cannot."""
    # Only a rank that has made its file listens: to any other the signal would be the end.
    asked = [trace for trace in traces if trace.ended is None and trace.pid is not None and job.stack(trace.rank).exists()]
    group.signal_ranks([trace.pid for trace in asked if trace.pid is not None], signal.SIGUSR2)
    deadline = time.monotonic() + _ANSWER_LIMIT_S
    while time.monotonic() < deadline and not all(job.stack(trace.rank).stat().st_size for trace in asked):
        time.sleep(_POLL_S)
    answers = {trace.rank: job.stack(trace.rank).read_text(errors="replace") for trace in asked}
    return {rank: answer for rank, answer in answers.items() if answer}
