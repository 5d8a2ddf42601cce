"""Gathers of ZeRO-3: when parameters are fetched and released, as DeepSpeed's `PartitionedParameterCoordinator` decides.

A module fetches what it lacks when it is used, in one all-gather. In a micro-step whose modules are used in the order that an
earlier one recorded, it then prefetches what the following modules need, up to the prefetch bucket, and nothing is released
that is used again soon. Otherwise parameters are released as soon as a module returns, and fetched again for backward: in the
first micro-step, in one that leaves the recorded order, from there on, and in the one after that, which records a new order.
(deepspeed.runtime.zero.partitioned_param_coordinator and parameter_offload of DeepSpeed 0.19.8)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from benchbox.theory.padding import round_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.theory.structure import Event, ParameterShape, Structure, Timeline

_MAX_LIVE_NUMEL = 10**9  # `stage3_max_live_parameters` and `stage3_max_reuse_distance`
_PREFETCH_SHARE = 10  # of the bucket: DeepSpeed's default, kept by `benchbox.backends.deepspeed`
_MAX_BUCKET = 500_000_000
_INT64 = 8


def partitioned_numel(parameter: ParameterShape, shards: int) -> int:
    """Return the elements of all partitions of a parameter, which are of one size."""
    return round_up(parameter.numel, shards)


def is_persistent(parameter: ParameterShape, structure: Structure) -> bool:
    """Return whether a parameter is small enough to stay whole on every rank."""
    return parameter.numel <= min(100_000, structure.numel // 1000)


def prefetch_limit(structure: Structure) -> int:
    """Return the elements that are prefetched at once."""
    return min(_MAX_BUCKET, structure.numel + structure.numel % 2) // _PREFETCH_SHARE


@dataclass(frozen=True, slots=True)
class Fetch:
    """Release, all-gather, wait and prefetch of parameters, by number, at a use of a module: in this order.

    Those in `gathered` and those in `prefetched` travel in one all-gather. The module waits for those in `awaited`.
    """

    released: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()
    prefetched: tuple[int, ...] = ()

    @property
    def gathers(self) -> list[tuple[int, ...]]:
        """The parameters of each all-gather."""
        return [numbers for numbers in (self.gathered, self.prefetched) if numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """Fetches of one micro-step, one for each use of a module.

    `broadcasts` are the bytes of the broadcasts by which the ranks compare a recorded order before forward; `before` and
    `after` are the parameters that are whole before and after it.
    """

    broadcasts: tuple[int, ...]
    before: frozenset[int]
    fetches: tuple[Fetch, ...]
    after: frozenset[int]


def fetch_parameters(structure: Structure, timeline: Timeline, accumulation: int) -> list[MicroStep]:
    """Return the micro-steps of the step that ends with that of `timeline`.

    Where the earlier ones are not known, they are like it: then the third of them is the first with a valid order.
    """
    earlier = timeline.earlier
    if earlier is None:
        earlier = (timeline.uses,) * (3 * accumulation - 1)
    coordinator = _Coordinator(structure, timeline)
    micro_steps = []
    for number, uses in enumerate((*earlier, timeline.uses), start=1):
        micro_steps.append(coordinator.run(uses))
        if number % accumulation == 0:
            coordinator.end_step()
    return micro_steps[-accumulation:]


class _Coordinator:
    """State of DeepSpeed's coordinator from micro-step to micro-step."""

    def __init__(self, structure: Structure, timeline: Timeline) -> None:
        self._numels = [parameter.numel for parameter in structure.parameters]
        self._layout = {
            name: tuple(sorted({*numbers, *timeline.external.get(name, ())})) for name, numbers in structure.layout.items()
        }
        self._persistent = frozenset(
            n for n, parameter in enumerate(structure.parameters) if is_persistent(parameter, structure)
        )
        self._prefetch_limit = prefetch_limit(structure)
        self._mode: Literal["record", "complete", "invalid"] = "invalid"
        self._order: list[str] = []  # recorded
        self._trace = _Trace((), self._layout, self._numels)
        self._available: set[int] = set()
        self._users: list[set[str]] = [set() for _ in structure.parameters]
        self._in_flight: set[int] = set()  # gathered, and not used yet
        self._in_backward: dict[str, None] = {}  # modules that have not returned
        self._queue: deque[tuple[int, int]] = deque()  # parameters to come, and the position of their use
        self._fetched_until: dict[int, int] = {}
        self._position = 0
        self._live_numel = 0
        # DeepSpeed caches these decisions, and keeps them also when the order changes
        self._release_cache: dict[tuple[str, int], frozenset[int]] = {}

    def run(self, uses: Iterable[Event]) -> MicroStep:
        """Return the fetches of a micro-step."""
        self._release_in_flight()
        broadcasts = self._reset()
        before = frozenset(self._available)
        fetches = []
        for use in uses:
            if use.kind in ("call", "call_backward"):
                fetches.append(self._fetch(use.name, is_backward=use.kind == "call_backward"))
            else:
                fetches.append(Fetch(self._return(use.name, is_backward=use.kind == "return_backward")))
        while self._in_backward:
            name, _ = self._in_backward.popitem()
            self._release(name, {number for number in self._layout[name] if number not in self._persistent})
        return MicroStep(broadcasts=broadcasts, before=before, fetches=tuple(fetches), after=frozenset(self._available))

    def end_step(self) -> None:
        """Partition all parameters, and gather those that persist."""
        self._in_flight.clear()
        self._available = set(self._persistent)

    def _reset(self) -> tuple[int, ...]:
        lengths: list[int] = []
        if self._mode != "complete":
            lengths.append(len(self._order))
            if self._mode == "record":
                self._trace = _Trace(self._order, self._layout, self._numels)
                lengths += [len(self._trace.parameters)] * 2
                self._mode = "complete"
            else:
                self._mode = "record"
        self._queue = deque(self._trace.parameters if self._mode == "complete" else ())
        self._fetched_until = {}
        self._position = self._live_numel = 0
        return tuple(size for length in lengths for size in (_INT64, _INT64 * length))

    def _fetch(self, name: str, *, is_backward: bool) -> Fetch:
        released: tuple[int, ...] = ()
        if self._mode == "complete" and not self._trace.has(self._position, name):
            self._mode, self._order = "invalid", []
            released = self._release_in_flight()
        if self._mode == "record":
            self._order.append(name)
        if is_backward:
            self._in_backward[name] = None
        numbers = self._layout[name]
        gathered = self._gather([number for number in numbers if number not in self._available])
        awaited = tuple(number for number in numbers if number in self._in_flight)
        for number in numbers:
            self._users[number].add(name)
        self._in_flight.difference_update(numbers)
        prefetched = self._gather(self._choose_prefetched(numbers)) if self._mode == "complete" else ()
        self._position += 1
        return Fetch(released, gathered, awaited, prefetched)

    def _gather(self, numbers: Sequence[int]) -> tuple[int, ...]:
        self._available.update(numbers)
        self._in_flight.update(numbers)
        self._live_numel += sum(self._numels[number] for number in numbers)
        return tuple(numbers)

    def _choose_prefetched(self, numbers: Sequence[int]) -> list[int]:
        pending = {number for number in numbers if self._fetched_until.get(number, -1) < self._position}
        while self._queue and pending:
            number, position = self._queue.popleft()
            self._fetched_until[number] = position
            pending.discard(number)
        chosen: list[int] = []
        numel, limit = 0, min(_MAX_LIVE_NUMEL - self._live_numel, self._prefetch_limit)
        while self._queue and numel < limit:
            number, position = self._queue.popleft()
            self._fetched_until[number] = max(self._fetched_until.get(number, -1), position)
            if number not in self._available and number not in chosen:
                chosen.append(number)
                numel += self._numels[number]
        return chosen

    def _return(self, name: str, *, is_backward: bool) -> tuple[int, ...]:
        if self._mode == "complete":
            key = name, self._position
            if key not in self._release_cache:
                self._release_cache[key] = frozenset(
                    number
                    for number in self._layout[name]
                    if number not in self._persistent
                    and self._fetched_until.get(number, -1) <= self._position
                    and not self._trace.is_used_soon(number, self._position)
                )
            releasable: Iterable[int] = self._release_cache[key]
        else:
            releasable = self._layout[name]
        if is_backward:
            self._in_backward.pop(name, None)
        return self._release(name, releasable)

    def _release(self, name: str, releasable: Iterable[int]) -> tuple[int, ...]:
        for number in self._layout[name]:
            self._users[number].discard(name)
        released = tuple(number for number in releasable if number in self._available and not self._users[number])
        self._available.difference_update(released)
        self._live_numel -= sum(self._numels[number] for number in released)
        return released

    def _release_in_flight(self) -> tuple[int, ...]:
        released = tuple(number for number in self._in_flight if not self._users[number])
        self._available.difference_update(released)
        self._live_numel -= sum(self._numels[number] for number in released)
        self._in_flight.clear()
        return released


class _Trace:
    """Recorded order of modules, and of their parameters with the position of each use."""

    def __init__(self, order: Sequence[str], layout: dict[str, tuple[int, ...]], numels: Sequence[int]) -> None:
        self._order = tuple(order)
        self.parameters = tuple((number, position) for position, name in enumerate(order) for number in layout[name])
        # elements that the modules before a position use
        sizes = (sum(numels[number] for number in layout[name]) for name in order)
        self._traversed = list(accumulate(sizes, initial=0))
        self._positions: dict[int, list[int]] = {}
        for number, position in self.parameters:
            self._positions.setdefault(number, []).append(position)

    def has(self, position: int, name: str) -> bool:
        """Return whether the module at a position is this one."""
        return position < len(self._order) and self._order[position] == name

    def is_used_soon(self, number: int, position: int) -> bool:
        """Return whether a parameter is used from a position on, before 10^9 other elements are."""
        positions = self._positions.get(number, [])
        index = bisect_left(positions, position)
        if index == len(positions):
            return False
        return self._traversed[positions[index]] - self._traversed[position] < _MAX_LIVE_NUMEL
