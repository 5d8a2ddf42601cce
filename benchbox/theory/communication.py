"""Count and bytes of the collectives of one optimizer step, as the records count them.

The bytes of a collective are those of the larger of input and output (`benchbox.observer.hooks.collectives`): an all-reduce of
N bytes, a reduce-scatter of N bytes into shards and an all-gather of shards into N bytes all count N. Every formula follows the
code of the library that it names; the versions are those of `constraints.txt`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from benchbox.theory.padding import ddp_buckets, fsdp1_flat_numel, fsdp2_shard_numel, zero_buckets, zero_group_numel
from benchbox.theory.structure import ROOT, fsdp2_backward_gathers
from benchbox.theory.zero3 import fetch_parameters, is_persistent, partitioned_numel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.theory.structure import CellSetup, Structure, Timeline

Traffic = dict[str, dict[str, int]]  # collective: count and bytes
DEEPSPEED_BUCKET = 500_000_000  # elements; `benchbox.backends.deepspeed` makes it no larger than the policy
_FLOAT32 = 4
_FLOAT64 = 8


class Tally:
    """Sum of collectives by kind, and by the number of ranks among which they run."""

    def __init__(self, world_size: int) -> None:
        self.traffic: Traffic = {}
        self.traffic_by_ranks: dict[int, Traffic] = {}
        self._world_size = world_size

    def add(self, operation: str, size: int, count: int = 1, *, ranks: int | None = None) -> None:
        """Add `count` collectives of `size` bytes together, among `ranks`, by default all."""
        if not count:
            return
        for traffic in (self.traffic, self.traffic_by_ranks.setdefault(ranks or self._world_size, {})):
            entry = traffic.setdefault(operation, {"count": 0, "bytes": 0})
            entry["count"] += count
            entry["bytes"] += size


def predict_traffic(structure: Structure, timeline: Timeline, setup: CellSetup) -> Tally:
    """Return the collectives of one optimizer step of a rank."""
    tally = Tally(setup.world_size)
    if setup.world_size == 1:
        return tally
    for operation, (count, size) in timeline.collectives.items():
        tally.add(operation, size * setup.accumulation, count * setup.accumulation)
    tally.add("all_reduce", _FLOAT32)  # the mean loss
    if setup.spike_guard:
        tally.add("all_reduce", _FLOAT32)  # the norm, on which the ranks agree
    if setup.backend == "ddp":
        _add_ddp(tally, structure, timeline, setup)
    elif setup.backend.startswith("fsdp1"):
        _add_fsdp(tally, structure, timeline, setup, first=True)
    elif setup.backend in ("fsdp2", "hsdp"):
        _add_fsdp(tally, structure, timeline, setup, first=False)
    elif setup.backend in ("zero1", "zero2"):
        _add_zero12(tally, structure, timeline, setup)
    elif setup.backend == "zero3":
        _add_zero3(tally, structure, timeline, setup)
    return tally


def _add_ddp(tally: Tally, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
    """Add a broadcast of the buffers of each dtype before forward, and an all-reduce of each bucket of gradients."""
    for size in structure.buffers.values():
        tally.add("broadcast", size)
    sizes = [structure.parameters[number].numel * setup.live_size for number in timeline.gradients]
    buckets = ddp_buckets(sizes)
    tally.add("all_reduce", sum(buckets), len(buckets))


def unit_bytes(structure: Structure, numbers: list[int], setup: CellSetup, *, first: bool) -> int:
    """Return the bytes of the gathered parameters of a unit, with padding: FSDP1 pads the unit, FSDP2 each parameter."""
    parameters = [structure.parameters[number] for number in numbers]
    if first:
        numel = fsdp1_flat_numel((parameter.numel for parameter in parameters), setup.shards, setup.live_size)
    else:
        numel = setup.shards * sum(fsdp2_shard_numel(parameter.shape, setup.shards) for parameter in parameters)
    return numel * setup.live_size


def _add_fsdp(tally: Tally, structure: Structure, timeline: Timeline, setup: CellSetup, *, first: bool) -> None:
    """Add the all-gathers of units in forward, and again in backward where forward freed them, and their reduce-scatters.

    The root stays gathered from forward to backward. SHARD_GRAD_OP keeps all units gathered, over the micro-steps that do not
    reduce as well (`_should_free_in_backward`). Under a hybrid strategy each reduced shard is all-reduced over the replicas.
    """
    shards, replicas = setup.shards, setup.world_size // setup.shards
    tally.add("all_reduce", _FLOAT32, ranks=shards)  # the gradient norm
    units = structure.units("fsdp1_unit" if first else "fsdp2_unit")
    gathers_of = _fsdp1_gathers(timeline) if first else _fsdp2_gathers(timeline, units)
    reduced = set(timeline.gradients)
    keeps = setup.backend.endswith("grad_op")
    for name, numbers in units.items():
        size = unit_bytes(structure, numbers, setup, first=first)
        if gathers := 1 if name == ROOT else gathers_of[name]:
            gathers = 1 if keeps else gathers * setup.accumulation
            tally.add("all_gather", size * gathers, gathers, ranks=shards)
        trained = [number for number in numbers if number in reduced]
        if not trained:
            continue
        if not first:
            size = unit_bytes(structure, trained, setup, first=False)
        tally.add("reduce_scatter", size, ranks=shards)
        if setup.is_hybrid:
            tally.add("all_reduce", size // shards, ranks=replicas)


def _fsdp1_gathers(timeline: Timeline) -> Counter[str]:
    """Return how often each unit but the root is gathered in forward and backward of one micro-step, with FULL_SHARD.

    Every call of its forward gathers it, and its first use in backward. So does a forward that checkpointing repeats before
    that use, which frees it again; one that is repeated later finds it gathered (`_pre_forward`, `BACKWARD_PRE`).
    """
    gathers: Counter[str] = Counter()
    in_backward: set[str] = set()
    for event in timeline.events:
        if event.kind == "enter" or (event.kind in ("enter_again", "enter_backward") and event.name not in in_backward):
            gathers[event.name] += 1
        if event.kind == "enter_backward":
            in_backward.add(event.name)
    return gathers


def _fsdp2_gathers(timeline: Timeline, units: Iterable[str]) -> Counter[str]:
    """Return how often each unit but the root is gathered in forward and backward of one micro-step.

    A unit within a checkpointed one that backward does not enter is gathered for its repeated forward.
    """
    again = fsdp2_backward_gathers(timeline, units)
    repeated = Counter(event.name for event in timeline.events if event.kind == "enter_again")
    entered = {event.name for event in timeline.events if event.kind == "enter"}
    return Counter({name: 1 + (1 if name in again else repeated[name]) for name in entered})


def bucket_limit(structure: Structure) -> int:
    """Return the elements of DeepSpeed's buckets: at most those of the policy, an even number."""
    return min(DEEPSPEED_BUCKET, structure.numel + structure.numel % 2)


def _add_zero12(tally: Tally, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
    """Add the all-reduces of the buckets, the norm of each group, and the all-gather of each group after its step.

    ZeRO-2 reduces in every micro-step, in the order of the gradients; ZeRO-1 once, in the order of the groups.
    """
    groups = structure.groups
    if setup.backend == "zero2":
        order, repeats = list(timeline.gradients), setup.accumulation
    else:
        order, repeats = [number for numbers in groups.values() for number in numbers], 1
    buckets = zero_buckets((structure.parameters[number].numel for number in order), bucket_limit(structure))
    tally.add("all_reduce", sum(buckets) * setup.live_size * repeats, len(buckets) * repeats)
    if setup.live_size == 2:
        tally.add("all_reduce", 1)  # whether any rank has a gradient that is not finite: bool
    norms = len(groups) * _zero_norms(setup)
    tally.add("all_reduce", _FLOAT32 * norms, norms)
    for numbers in groups.values():
        numels = (structure.parameters[number].numel for number in numbers)
        tally.add("all_gather", zero_group_numel(numels, setup.world_size) * setup.live_size)


def _add_zero3(tally: Tally, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
    """Add the all-gathers of modules and, after the step, of what persists, the broadcasts by which the ranks compare an order
    of modules that they have recorded, the reduce-scatters of buckets and the norms of groups in float64.
    """
    shards, parameters = setup.world_size, structure.parameters
    for micro_step in fetch_parameters(structure, timeline, setup.accumulation):
        for size in micro_step.broadcasts:
            tally.add("broadcast", size)
        for numbers in (numbers for fetch in micro_step.fetches for numbers in fetch.gathers):
            tally.add("all_gather", sum(partitioned_numel(parameters[number], shards) for number in numbers) * setup.live_size)
    for parameter in parameters:
        if is_persistent(parameter, structure):  # DeepSpeed gathers these one by one
            tally.add("all_gather", partitioned_numel(parameter, shards) * setup.live_size)
    buckets = zero_buckets((parameters[number].numel for number in timeline.gradients), bucket_limit(structure))
    padded = sum(partitioned_numel(parameters[number], shards) for number in timeline.gradients)
    tally.add("reduce_scatter", padded * setup.live_size * setup.accumulation, len(buckets) * setup.accumulation)
    norms = len(structure.groups) * _zero_norms(setup)
    tally.add("all_reduce", _FLOAT64 * norms, norms)


def _zero_norms(setup: CellSetup) -> int:
    """Return how often the norm of each group is computed: in DeepSpeed's step, and before it for the spike guard."""
    return 2 if setup.spike_guard else 1
