"""Which rank a stuck group waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.phases import RankState

# A rank says where it is every second; one that has not for this long is dead, stopped, or holds the interpreter's lock.
_SILENT_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class RootCause:
    """The rank that held the others up, or None where they cannot be told apart, where it stood, and a sentence on both."""

    rank: int | None
    state: RankState | None
    sentence: str


def stopped_reporting(trace: Trace, at: float) -> bool:
    """Whether a rank that has not ended had stopped telling where it is by that unix time."""
    return trace.last_seen is None or at - trace.last_seen > _SILENT_AFTER_S


def find_root_cause(traces: Sequence[Trace], at: float) -> RootCause:
    """The rank furthest behind: whoever is ahead of it waits for it in a collective.

    A rank that no longer says where it is, while others do, is behind wherever it was last seen.
    """
    unfinished = [trace for trace in traces if trace.ended is None]
    if not unfinished:
        return RootCause(None, None, "every rank was done, and the group did not exit")
    quiet = [trace for trace in unfinished if stopped_reporting(trace, at)]
    among = quiet if quiet and len(quiet) < len(unfinished) else unfinished
    furthest_behind = min(map(_order, among))
    suspects = [trace for trace in among if _order(trace) == furthest_behind]
    state = suspects[0].state
    stood = str(state) if state else "its start"
    if len(suspects) > 1:
        ranks = ", ".join(str(trace.rank) for trace in suspects)
        return RootCause(None, state, f"ranks {ranks} all stood in {stood}, so which of them held the others up is unknown")
    suspect = suspects[0]
    seconds = f" for {at - state.since:.0f} s" if state else ""
    behind = ", the furthest behind" if len(traces) > 1 else ""
    hush = ", and had stopped saying so" if quiet and among is quiet else ""
    return RootCause(suspect.rank, state, f"rank {suspect.rank} stood in {stood}{seconds}{behind}{hush}")


def _order(trace: Trace) -> tuple[int, int, int]:
    return trace.state.order if trace.state else (-1, 0, 0)
