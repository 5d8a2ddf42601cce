"""Steps in a trace of torch's profiler: annotations of steps and phases, and times by tower and operation from its events."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._C._autograd import DeviceType
from torch.profiler import record_function

from benchbox.measure.phases import CallbackContext, ContextInstrument
from benchbox.measure.towers import ANNOTATION as TOWER
from benchbox.registry.phases import OUTSIDE_PHASES, PHASES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.measure.towers import TowerTracker
    from benchbox.store.rank_profile import OperatorTime

STEP, PHASE = "step", "phase:"
NO_TOWER = ""
BETWEEN_OPERATIONS = "Python between operations"
_NCCL_KERNEL = "nccl"  # ncclDevKernel_AllReduce_Sum_bf16_RING_LL
_NODE = "autograd::engine::evaluate_function: "
_BACKWARD_SCOPE = 1  # at::RecordScope::BACKWARD_FUNCTION


class TraceInstrument(ContextInstrument):
    """Instrument that annotates steps and phases for torch's profiler."""

    def __init__(self) -> None:
        self._step = _annotation(STEP)
        self._phases = {name: _annotation(f"{PHASE}{name}") for name in PHASES}


def _annotation(name: str) -> CallbackContext:
    opened: list[Any] = []

    def enter() -> None:
        opened.append(record_function(name))
        opened[-1].__enter__()

    def leave(_: bool) -> None:
        opened.pop().__exit__(None, None, None)

    return CallbackContext(enter, leave)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTimes:
    """Times of the steps of a trace. Those of towers add up to those of phases on the host.

    On a GPU `tower_s` and `operators` are times of kernels, by the operation that launched them. Kernels of collectives run
    beside others and wait for other ranks: they are in `operators` and, together, in `collective_s`, and not in `tower_s`.
    """

    tower_s: dict[str, dict[str, float]]  # phase -> tower, NO_TOWER where there is none
    collective_s: float | None  # None on the host
    operators: list[OperatorTime]  # longest first


def read_trace(events: Iterable[Any], towers: TowerTracker, *, on_host: bool) -> TraceTimes:
    """Sum the self times of a profiler's events by phase and tower, and by operation.

    Args:
        events: of `torch.profiler.profile.events()`.
        towers: that annotated the same steps.
        on_host: whether operations run on the host, else kernels are counted.
    """
    host_events = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    steps = [event for event in host_events if event.name == STEP]
    positions = _Positions([event for event in host_events if event.name.startswith(PHASE)], steps, towers)
    tower_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    operators: dict[str, OperatorTime] = {}
    collective_s = 0.0
    for event in host_events:
        position = positions.of(event)
        is_annotation = event.name == STEP or event.name.startswith((PHASE, TOWER))
        if position is None or (is_annotation and not on_host):
            continue
        phase, tower = position
        seconds = float(event.self_cpu_time_total if on_host else event.self_device_time_total) / 1e6
        of_collectives = 0.0 if on_host else _seconds_of_collectives(event)
        collective_s += of_collectives
        tower_s[phase][tower] += seconds - of_collectives
        name = BETWEEN_OPERATIONS if is_annotation else event.name
        operator = operators.setdefault(name, {"name": name, "calls": 0, "self_s": 0.0})
        operator["calls"] += 1
        operator["self_s"] += seconds
    return TraceTimes(
        tower_s={phase: dict(seconds) for phase, seconds in tower_s.items()},
        collective_s=None if on_host else collective_s,
        operators=sorted(operators.values(), key=lambda operator: -operator["self_s"]),
    )


def _seconds_of_collectives(event: Any) -> float:
    """Return the time of the kernels of NCCL that an operation has launched itself."""
    return float(sum(kernel.duration for kernel in event.kernels if kernel.name.startswith(_NCCL_KERNEL))) / 1e6


class _Positions:
    """Phase and tower of events, from the annotations and the autograd nodes that contain them."""

    def __init__(self, phases: list[Any], steps: list[Any], towers: TowerTracker) -> None:
        self._phases, self._towers = phases, towers
        self._threads = {event.thread for event in steps}
        self._positions: dict[int, tuple[str, str] | None] = {}

    def of(self, event: Any) -> tuple[str, str] | None:
        """Return (phase, tower), or None of an event outside the steps."""
        if id(event) not in self._positions:
            self._positions[id(event)] = self._locate(event)
        return self._positions[id(event)]

    def _locate(self, event: Any) -> tuple[str, str] | None:
        if event.name == STEP:
            return OUTSIDE_PHASES, NO_TOWER
        parent = self.of(event.cpu_parent) if event.cpu_parent is not None else self._by_time(event)
        if parent is None:
            return None
        phase, tower = parent
        if event.name.startswith(PHASE):
            return event.name.removeprefix(PHASE), NO_TOWER
        if event.name.startswith(TOWER):
            return phase, event.name.removeprefix(TOWER)
        if event.name.startswith(_NODE):
            return phase, self._tower_of_node(event)
        return phase, tower

    def _by_time(self, event: Any) -> tuple[str, str] | None:
        """Return the phase in which an event of another thread begins: backward has threads of its own on a GPU."""
        if event.thread in self._threads:
            return None
        start = event.time_range.start
        for phase in self._phases:
            if phase.time_range.start <= start < phase.time_range.end:
                return phase.name.removeprefix(PHASE), NO_TOWER
        return None

    def _tower_of_node(self, event: Any) -> str:
        numbered = (event, *(child for child in event.cpu_children if child.scope == _BACKWARD_SCOPE))
        sequence = next((candidate.sequence_nr for candidate in numbered if candidate.sequence_nr >= 0), None)
        return NO_TOWER if sequence is None else self._towers.tower_of_node(sequence) or NO_TOWER
