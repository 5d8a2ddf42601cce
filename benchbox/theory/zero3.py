"""Gathers of ZeRO-3: which parameters are fetched together, as DeepSpeed's `PartitionedParameterCoordinator` decides.

A module fetches what it lacks when it is called, in one all-gather, and then prefetches what the following modules need, up to
the prefetch bucket. As long as a policy has fewer than 10^9 elements (`max_live_parameters`, `max_reuse_distance`) nothing is
released between forward and backward, so that each parameter is gathered once in a micro-step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from benchbox.theory.padding import round_up

if TYPE_CHECKING:
    from benchbox.theory.structure import ParameterShape, Structure, Timeline

MAX_LIVE_NUMEL = 10**9
_PREFETCH_SHARE = 10  # of the bucket: DeepSpeed's default, kept by `benchbox.backends.deepspeed`
_MAX_BUCKET = 500_000_000


def partitioned_numel(parameter: ParameterShape, shards: int) -> int:
    """Return the elements of all partitions of a parameter, which are of one size."""
    return round_up(parameter.numel, shards)


def is_persistent(parameter: ParameterShape, structure: Structure) -> bool:
    """Return whether a parameter is small enough to stay whole on every rank."""
    return parameter.numel <= min(100_000, structure.numel // 1000)


def prefetch_limit(structure: Structure) -> int:
    """Return the elements that are prefetched at once."""
    return min(_MAX_BUCKET, structure.numel + structure.numel % 2) // _PREFETCH_SHARE


def forward_gathers(structure: Structure, timeline: Timeline) -> list[list[list[int]]]:
    """Return the all-gathers at each call of a module in forward, as numbers of parameters, from the third step on."""
    calls = [structure.layout[event.name] for event in timeline.events if event.kind == "call"]
    available = {number for number, parameter in enumerate(structure.parameters) if is_persistent(parameter, structure)}
    queue = deque((number, step) for step, numbers in enumerate(calls) for number in numbers)
    fetched_until: dict[int, int] = {}
    gathers: list[list[list[int]]] = []

    def gather(numbers: list[int]) -> None:
        if numbers:
            gathers[-1].append(numbers)
            available.update(numbers)

    for step, numbers in enumerate(calls):
        gathers.append([])
        gather([number for number in numbers if number not in available])
        pending = {number for number in numbers if fetched_until.get(number, -1) < step}
        while queue and pending:
            number, use = queue.popleft()
            fetched_until[number] = use
            pending.discard(number)
        prefetched: list[int] = []
        numel, limit = 0, prefetch_limit(structure)
        while queue and numel < limit:
            number, use = queue.popleft()
            fetched_until[number] = max(fetched_until.get(number, -1), use)
            if number not in available and number not in prefetched:
                prefetched.append(number)
                numel += structure.parameters[number].numel
        gather(prefetched)
    return gathers
