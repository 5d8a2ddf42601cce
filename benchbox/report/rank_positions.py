"""Position of every rank of a stuck group as text: what it did, the collectives that it called last, and its stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.launch.supervise.desync import describe_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.registry.launch_record import RankPosition


def describe_positions(positions: Sequence[RankPosition]) -> str:
    """Return the positions of all ranks as lines of text."""
    return "\n".join(line for position in positions for line in _lines(position))


def _lines(position: RankPosition) -> Iterator[str]:
    step = None if position["step"] is None else f"step {position['step']}"
    where = ", ".join(part for part in (position["stage"], step, position["phase"]) if part)
    yield f"rank {position['rank']}: {where or 'its position is unknown'}"
    if position["reason"]:
        yield f"  its collectives are unknown: {position['reason']}"
    elif position["collective"]:
        yield f"  waits in {describe_call(position['collective'])}"
    else:
        yield "  waits in no collective"
    if position["last_collectives"]:
        yield "  last collectives, the latest first:"
    for call in reversed(position["last_collectives"]):
        state = "done" if call["is_done"] else "not done"
        yield f"    {call['sequence']} of group {call['group']}: {describe_call(call)}, {state}"
    if position["stack"]:
        yield "  stack:"
        yield from (f"    {line}" for line in position["stack"].splitlines())
