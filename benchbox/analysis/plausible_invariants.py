"""Invariants of the figures of one record: they are finite, agree with one another, and are possible at all."""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING

from benchbox.analysis.invariant import Invariant, is_partly_frozen
from benchbox.registry.launch_record import device_type
from benchbox.registry.phases import COMPILATION, MEASURED_STAGES, PHASES, PROBED_STEPS, STEP_PARTS
from benchbox.registry.recipes import BUILT_IN_RECIPES
from benchbox.store.step_split import CLOCK_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.registry.launch_record import LaunchRecord

ROUNDING = 1e-6

# A host is held to its limit in the warm-up, and its peak is that of a later step.
LIMIT_TOLERANCE = 0.01

WHOLE_PARAMETERS = ("single", "ddp", "zero1", "zero2")  # on every rank
_SHARDED_MASTERS = ("fsdp1_full", "fsdp1_grad_op", "fsdp1_hybrid", "fsdp1_hybrid_grad_op", "fsdp2", "hsdp")
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


def _status_and_error(record: LaunchRecord) -> Iterable[str] | None:
    error = record["error"]
    if record["status"] != "ok" or error is None:
        return []
    return [f"status ok, and the error is {error['type']}: {error['message']}"]


def _error_position(record: LaunchRecord) -> Iterable[str] | None:
    error = record["error"]
    if error is None:
        return None
    # Steps are numbered from 1 in each stage that has any.
    steps: dict[str | None, int] = {"warmup": record["warmup_steps"], "measure": record["steps"], "probe": PROBED_STEPS}
    messages = []
    for position in (error, *error.get("ranks", ())):
        rank, stage, step, phase = position["rank"], position.get("stage"), position.get("step"), position["phase"]
        if rank is not None and not 0 <= rank < record["cell"]["world_size"]:
            messages.append(f"the error is of rank {rank}, of {record['cell']['world_size']} ranks")
        if stage is not None and stage not in MEASURED_STAGES:
            messages.append(f"the error is of stage {stage}, and a launch has no such stage")
        elif step is not None and "stage" in position and not 1 <= step <= steps.get(stage, 0):
            messages.append(f"the error is of step {step} of stage {stage}, of {steps.get(stage, 0)} steps")
        if phase is not None and phase not in (*PHASES, COMPILATION):
            messages.append(f"the error is of phase {phase}, and a step has no such phase")
    return messages


def _finite(record: LaunchRecord) -> Iterable[str] | None:
    if record["status"] != "ok":
        return None
    series = {"loss": record["loss"] or [], "grad_norm": record["grad_norm"] or []}
    skipped = set(record.get("skipped_steps") or ())  # by `optim.spike`, which a norm that is not finite always is
    # JSON has no NaN: a record keeps null in its place.
    messages = [
        f"{name} of step {step} is not a finite number"
        for name, values in series.items()
        for step, value in enumerate(values)
        if (value is None or not math.isfinite(value)) and step not in skipped
    ]
    norms = (value for value in series["grad_norm"] if value is not None)
    return messages + [f"a gradient norm is {value}" for value in norms if value < 0]


def _positive_times(record: LaunchRecord) -> Iterable[str] | None:
    if record["step_time_s"] is None:
        return None
    messages = [
        f"rank {rank}: step {step} took {time_s} s"
        for rank, steps in enumerate(record["step_time_s"]["per_rank"])
        for step, time_s in enumerate(steps)
        if not 0 < time_s < math.inf
    ]
    for name, phase in (record["phases_s"] or {}).items():
        messages += [f"rank {rank}: negative {name}" for rank, times in enumerate(phase["per_rank"]) if min(times) < 0]
    return messages


def _step_parts(record: LaunchRecord) -> Iterable[str] | None:
    split, step_time = record.get("step_split_s"), record["step_time_s"]
    if not split or step_time is None:
        return None
    if set(split) != set(STEP_PARTS):
        return [f"a step has the parts {', '.join(split)}"]
    messages = []
    for rank, steps in enumerate(step_time["per_rank"]):
        parts = [part["per_rank"][rank] for part in split.values()]
        if any(len(times) != len(steps) or min(times) < 0 for times in parts):
            messages.append(f"rank {rank}: a part is negative, or of other steps")
            continue
        # What is left of a step is `compute`. Nothing is where the clock of the collectives saw waits longer than the step.
        for step, (part_s, step_s) in enumerate(zip(map(sum, zip(*parts, strict=True)), steps, strict=True)):
            if not step_s * (1 - ROUNDING) <= part_s <= step_s * (1 + CLOCK_TOLERANCE):
                messages.append(f"rank {rank}: step {step} took {step_s:.6f} s, and its parts {part_s:.6f} s")
    return messages


def _launch_contains_steps(record: LaunchRecord) -> Iterable[str] | None:
    datetime.fromisoformat(record["started_at"])
    if record["step_time_s"] is None:
        return None
    longest = max(sum(steps) for steps in record["step_time_s"]["per_rank"])
    if longest > record["duration_s"]:
        return [f"the steps took {longest:.3f} s, and the launch {record['duration_s']:.3f} s"]
    return []


def _window_contains_steps(record: LaunchRecord) -> Iterable[str] | None:
    host_state, step_time = record.get("host"), record["step_time_s"]
    if not host_state or step_time is None:
        return None
    messages = []
    for host in host_state["hosts"]:
        # The first rank of a host observes it, over its own steps, and enters the window a barrier before the first of them. On
        # a busy host another one may need a little longer.
        steps_s = sum(step_time["per_rank"][min(host["ranks"])])
        if steps_s > (1 + CLOCK_TOLERANCE) * host["window_s"]:
            messages.append(f"the steps took {steps_s:.3f} s, and the host was observed over {host['window_s']:.3f} s")
        if host["window_s"] > record["duration_s"]:
            messages.append(f"the host was observed over {host['window_s']:.3f} s, and the launch took less")
    return messages


def _worst_memory(record: LaunchRecord) -> Iterable[str] | None:
    memory = record["memory"]
    if memory is None:
        return None
    messages, worst, peaks = [], memory["worst"], memory["per_rank"]
    allocated, reserved = [peak["allocated_peak_bytes"] for peak in peaks], [peak["reserved_peak_bytes"] for peak in peaks]
    comparisons = (
        ("allocated", worst["allocated_peak_bytes"], allocated),
        ("reserved", worst["reserved_peak_bytes"], reserved),
    )
    for name, value, of_ranks in comparisons:
        peak_bytes = [peak for peak in of_ranks if peak is not None]
        if value != (max(peak_bytes) if len(peak_bytes) == len(of_ranks) else None):
            messages.append(f"the worst {name} peak is {value}, and the ranks have {of_ranks}")
    sizes = allocated if worst["reserved_peak_bytes"] is None else reserved
    largest = worst["allocated_peak_bytes"] if worst["reserved_peak_bytes"] is None else worst["reserved_peak_bytes"]
    rank = worst["rank"]
    if not messages and (rank is not None if largest is None else rank is None or sizes[rank] != largest):
        messages.append(f"rank {worst['rank']} is named as the worst, and the ranks have {sizes}")
    return messages


def _memory_limit(record: LaunchRecord) -> Iterable[str] | None:
    limit, memory, cell = record.get("memory_limit_bytes"), record["memory"], record["cell"]
    if record["status"] != "ok" or limit is None or memory is None:
        return None
    is_host = memory["source"] != "torch.cuda"
    # On a host a longer batch, or a backbone that trains from a later step on, may need more after the warm-up.
    if is_host and (cell.get("padding", "full") != "full" or cell["optim"].get("freeze_backbone_steps", 0)):
        return None
    most = limit * (1 + LIMIT_TOLERANCE) if is_host else limit
    return [
        f"rank {rank}: {size} bytes at the peak, and the limit under which it ran is {limit}"
        for rank, peak in enumerate(memory["per_rank"])
        if (size := max(peak["allocated_peak_bytes"] or 0, peak["reserved_peak_bytes"] or 0)) > most
    ]


def _memory_source(record: LaunchRecord) -> Iterable[str] | None:
    memory, observed = record["memory"], record["observed"]
    if memory is None or observed is None:
        return None
    is_cuda = all(device_type(device) == "cuda" for device in observed["device"])
    if (memory["source"] == "torch.cuda") != is_cuda:
        return [f"memory of source {memory['source']}, and the ranks ran on {', '.join(sorted(set(observed['device'])))}"]
    return []


def least_state_bytes(record: LaunchRecord) -> list[int] | None:
    """Return bytes of parameters, masters and Adam moments that every rank must hold, or None where they are not known.

    With P parameters, and S of them stepped on a rank: s*P + (m + 2*o)*S bytes where parameters are whole on every rank, else
    (s + m + 2*o)*S. s, m, o are the bytes of a live parameter, a master and a moment in the recipe (ZeRO, arXiv:1910.02054,
    section 3). FSDP shards what is stepped: s is that of a master there, and m is 0. Gradients, activations and buffers come
    on top: this is a bound from below, and no prediction.
    """
    observed, cell = record["observed"], record["cell"]
    recipe = BUILT_IN_RECIPES.get(cell["recipe"])
    if observed is None or recipe is None:
        return None
    shards = [shard for shard in observed["shard_numel"] if shard is not None]
    if len(shards) < len(observed["shard_numel"]):
        return None
    stored, stepped = ITEM_BYTES[recipe.storage], ITEM_BYTES[recipe.stepped or recipe.storage]
    state = (stepped if recipe.masters else 0) + 2 * stepped
    if cell["backend"] in WHOLE_PARAMETERS:
        return [stored * observed["total_numel"] + state * shard for shard in shards]
    if cell["backend"] == "zero3":
        return [(stored + state) * shard for shard in shards]
    if cell["backend"] in _SHARDED_MASTERS:
        return [3 * stepped * shard for shard in shards]
    return None


def _memory_bound(record: LaunchRecord) -> Iterable[str] | None:
    bounds = least_state_bytes(record)
    if record["status"] != "ok" or record["memory"] is None or bounds is None or is_partly_frozen(record):
        return None
    peaks = [peak["allocated_peak_bytes"] for peak in record["memory"]["per_rank"]]
    return [
        f"rank {rank}: {peak} bytes at the peak, and parameters, masters and moments alone take {bound}"
        for rank, (peak, bound) in enumerate(zip(peaks, bounds, strict=True))
        if peak is not None and peak < bound
    ]


def _utilisations_agree(record: LaunchRecord) -> Iterable[str] | None:
    mfu, hfu = record["mfu"], record.get("hfu")
    if mfu is None or hfu is None:
        return None
    return [] if hfu >= mfu else [f"HFU {hfu:.3f} is below MFU {mfu:.3f}"]


PLAUSIBLE_INVARIANTS = (
    Invariant("ok means no error", _status_and_error),
    Invariant("an error is of a rank, stage, step and phase that there are", _error_position),
    Invariant("loss and gradient norm are finite in every step", _finite),
    Invariant("every step takes time", _positive_times),
    Invariant(f"the parts of a step add up to it on every rank, to at most {CLOCK_TOLERANCE:.0%} more", _step_parts),
    Invariant("a launch lasts at least as long as its steps", _launch_contains_steps),
    Invariant("the host was observed for as long as the steps took", _window_contains_steps),
    Invariant("worst memory = maximum over ranks", _worst_memory),
    Invariant(f"no peak is above the memory limit, on a host by more than {LIMIT_TOLERANCE:.0%}", _memory_limit),
    Invariant("memory is measured where the device says", _memory_source),
    Invariant("memory holds parameters, masters and moments", _memory_bound),
    Invariant("HFU is not below MFU", _utilisations_agree),
)
