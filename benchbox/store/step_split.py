"""Every step of every rank, split into own work, waiting for other ranks, and transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.launch_record import Phase
    from benchbox.store.rank_result import BlockedTime, CollectiveTimes, RankResult

_NOT_RECORDED = "a rank did not record its collectives"
_CLOCKS = "ranks are on different hosts, whose clocks are not compared"
_CLOCK_WAS_SET = "waits are longer than their step: the clock of the host was set while it was measured"

CLOCK_TOLERANCE = 0.02  # of two clocks of one host


def split_steps(ranks: Sequence[RankResult]) -> tuple[dict[str, Phase] | None, str | None]:
    """Return the parts of `STEP_PARTS` on every rank in every step, or None and the reason.

    A blocked rank waits for others until the last of them has arrived at the collectives that it has itself arrived at, and for
    the transfer from then on. What is left of the step is its own work, of which it lacked a core for `core_wait`. Waits are
    taken from the clock of the host, which may be set at any time.
    """
    times = [times for result in ranks if (times := result.get("collective_times")) is not None]
    if not ranks or len(times) < len(ranks):
        reasons = (reason for result in ranks if (reason := result.get("collective_times_reason")))
        return None, next(reasons, _NOT_RECORDED)
    if len({entry["clock"] for entry in times}) > 1 or times[0]["clock"] is None:
        return None, _CLOCKS
    steps = min(len(entry["steps"]) for entry in times)
    last = [_last_arrivals([entry["arrivals"][step] for entry in times]) for step in range(steps)]
    split: dict[str, Phase] = {}
    for result, entry in zip(ranks, times, strict=True):
        data_wait = result["phases_s"].get("data_wait") or [0.0] * steps
        rows = [_split(entry, step, last[step], result["step_time_s"][step], data_wait[step]) for step in range(steps)]
        for row, step_s in zip(rows, result["step_time_s"], strict=False):
            if min(row.values()) < 0 or sum(row.values()) > (1 + CLOCK_TOLERANCE) * step_s:
                return None, _CLOCK_WAS_SET
        for part in rows[0] if rows else ():
            split.setdefault(part, {"per_rank": []})["per_rank"].append([row[part] for row in rows])
    return split, None


def _last_arrivals(arrivals: Sequence[Sequence[Sequence[object]]]) -> dict[str, int]:
    """Return when the last of all ranks arrived at each collective of a step."""
    last: dict[str, int] = {}
    for rank in arrivals:
        for name, at in rank:
            last[str(name)] = max(int(at), last.get(str(name), 0))  # type: ignore[call-overload]
    return last


def _split(times: CollectiveTimes, step: int, last: Mapping[str, int], step_s: float, data_wait_s: float) -> dict[str, float]:
    rank_wait_ns = transfer_ns = 0
    arrivals = [(str(name), int(at)) for name, at in times["arrivals"][step]]
    for blocked in times["blocked"][step]:
        waited, moved = _split_blocked(blocked, arrivals, last)
        rank_wait_ns += waited
        transfer_ns += moved
    own_s = max(0.0, step_s - data_wait_s - (rank_wait_ns + transfer_ns) / 1e9)
    core_waits = times["core_wait_s"]
    core_wait_s = 0.0 if core_waits is None else min(core_waits[step], own_s)
    return {
        "data_wait": data_wait_s,
        "compute": own_s - core_wait_s,
        "core_wait": core_wait_s,
        "rank_wait": rank_wait_ns / 1e9,
        "transfer": transfer_ns / 1e9,
    }


def _split_blocked(blocked: BlockedTime, arrivals: Sequence[tuple[str, int]], last: Mapping[str, int]) -> tuple[int, int]:
    """Return ns of waiting for ranks and of transfer in one interval."""
    awaited = max((last[name] for name, at in arrivals if at <= blocked["start"]), default=blocked["start"])
    waited = min(max(awaited - blocked["start"], 0), blocked["end"] - blocked["start"])
    moved = blocked["end"] - blocked["start"] - waited if blocked["until"] == "completion" else 0
    return waited, moved
