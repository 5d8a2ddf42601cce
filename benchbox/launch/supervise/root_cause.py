"""Search for the rank that a stuck group waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.supervise.trace import Trace
    from benchbox.registry.phases import RankState

# A rank writes a heartbeat every second; without one for this long it is dead, stopped, or does not release the GIL.
_SILENT_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class RootCause:
    """The rank that held the others up and its state; the rank is None where several are equally far behind."""

    rank: int | None
    state: RankState | None
    explanation: str


def stopped_reporting(trace: Trace, at: float) -> bool:
    """Return whether a rank that has not ended wrote no event in the last seconds before `at`, by the monotonic clock."""
    return trace.last_event_at is None or at - trace.last_event_at > _SILENT_AFTER_S


def find_root_cause(traces: Sequence[Trace], at: float) -> RootCause:
    """Return the rank furthest behind: the ranks ahead of it wait for it in a collective.

    A rank that stopped reporting while others still report is behind them, whatever its last state.

    Args:
        traces: one per rank.
        at: monotonic time in seconds at which the group was found stuck.
    """
    unfinished = [trace for trace in traces if trace.final_event is None]
    if not unfinished:
        return RootCause(None, None, "every rank was done, and the group did not exit")
    silent = [trace for trace in unfinished if stopped_reporting(trace, at)]
    candidates = silent if silent and len(silent) < len(unfinished) else unfinished
    lowest_order = min(map(_order, candidates))
    suspects = [trace for trace in candidates if _order(trace) == lowest_order]
    state = suspects[0].state
    location = str(state) if state else "its start"
    if len(suspects) > 1:
        ranks = ", ".join(str(trace.rank) for trace in suspects)
        return RootCause(None, state, f"ranks {ranks} were all in {location}, so which of them held the others up is unknown")
    suspect = suspects[0]
    duration = f" for {at - state.since:.0f} s" if state else ""
    behind = ", the furthest behind" if len(traces) > 1 else ""
    silence = ", and had stopped sending heartbeats" if silent and candidates is silent else ""
    return RootCause(suspect.rank, state, f"rank {suspect.rank} was in {location}{duration}{behind}{silence}")


def _order(trace: Trace) -> tuple[int, int, int]:
    return trace.state.order if trace.state else (-1, 0, 0)
