"""The section of a report that compares what was observed in each cell with what was requested."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN, counted, quantity
from benchbox.analysis.summary import CellSummary, label, matrix_text
from benchbox.registry.padding import describe_sizes
from benchbox.registry.weights import weights_text
from benchbox.report.peak_share import peak_share_lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.launch_record import (
        CollectiveRecord,
        DeviceRecord,
        Flops,
        HostState,
        LaunchRecord,
        ObservedRecord,
        Setting,
        StartEnd,
    )
    from benchbox.store.peaks import MeasuredPeaks

# Where the graphs of a launch came from, by whether some were found in the cache on disk, and whether some were compiled.
_GRAPH_SOURCES = {
    (True, False): "from the cache",
    (True, True): "with some from the cache",
    (False, True): "with an empty cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observed value, beside the requested one where there is one."""

    name: str
    requested: str | None
    observed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCell:
    """The observations of a cell."""

    cell_id: str
    cell: str
    observations: tuple[Observation, ...]


def requested_and_observed(
    summaries: Sequence[CellSummary], axes: Sequence[str], peaks: Mapping[str, MeasuredPeaks] | str | None = None
) -> tuple[ObservedCell, ...]:
    """Return the observations of every cell that has any.

    Args:
        summaries: of the cells.
        axes: fields in which the cells differ.
        peaks: of the machine by group of ranks, or why they are unknown; shares of them are added. Without, none are.
    """
    return tuple(
        _observed_cell(summary, summary.evidence, summary.observed, axes, peaks)
        for summary in summaries
        if summary.evidence is not None and summary.observed is not None
    )


def _observed_cell(
    summary: CellSummary,
    record: LaunchRecord,
    observed: ObservedRecord,
    axes: Sequence[str],
    peaks: Mapping[str, MeasuredPeaks] | str | None,
) -> ObservedCell:
    cell = summary.cell
    shares = () if peaks is None else peak_share_lines(summary, record, peaks)
    shards = [count for count in observed["shard_numel"] if count is not None]
    loss = summary.values["final_loss"]
    weights = [("published weights", cell["weights"], weights_text(observed.get("weights")))] if cell.get("weights") else []
    decoders = [("video decoder", None, _decoders(observed))] if any(observed.get("video_decoder") or ()) else []
    settings = [("backend settings", None, _settings(observed["settings"]))] if "settings" in observed else []
    padding = f"padding {cell.get('padding', 'full')}"
    micro_batches = [("micro-batches", padding, _micro_batches(observed))] if "micro_batch_sizes" in observed else []
    observations: tuple[tuple[str, Any, Any], ...] = (
        ("backend", cell["backend"], observed["backend"]),
        ("model", None, observed["model_class"]),
        ("sharding", None, observed["sharding"]),
        ("shard elements, by rank", None, ", ".join(f"{count:,}" for count in shards)),
        ("ranks", cell["world_size"], observed["world_size"]),
        ("device", None, ", ".join(dict.fromkeys(str(device) for device in observed["device"]))),
        *decoders,
        ("attention", cell["attention"], _attention(observed)),
        ("checkpointing", matrix_text(cell["checkpointing"]), _recomputed_modules(observed["checkpointed_modules"])),
        *micro_batches,
        *(("torch.compile", cell.get("compile", "off"), line) for line in [*_compilation(record), *_compile_times(summary)]),
        ("parameters that train", cell.get("freeze"), _trainable_share(observed)),
        *weights,
        *settings,
        *(("data", None, line) for line in _data(record)),
        *(("host", None, host) for host in _hosts(summary.launches.host)),
        ("optimizer", None, " > ".join(observed["optimizer_chain"])),
        ("collectives in a step", None, _collectives(record["collectives"])),
        ("FLOPs of a step", None, _flops(record["flops"])),
        ("FLOPs by tower, by formula", None, _tower_flops(record["flops"])),
        *(("share of the peaks", None, line) for line in shares),
        ("final loss", None, quantity(None if loss is None else loss.value, "loss")),
    )
    return ObservedCell(
        cell_id=summary.cell_id,
        cell=label(cell, axes),
        observations=tuple(_observation(*values) for values in observations),
    )


def _observation(name: str, requested: Any, observed: Any) -> Observation:
    return Observation(
        name=name,
        requested=None if requested is None else str(requested),
        observed=UNKNOWN if observed in (None, "") else str(observed),
    )


def _decoders(observed: ObservedRecord) -> str:
    return ", ".join(dict.fromkeys(str(decoder) for decoder in observed.get("video_decoder", ())))


def _micro_batches(observed: ObservedRecord) -> str | None:
    """Return the sizes of the micro-batches of all ranks beside those of the policy's spec, or why they are unknown."""
    ranks = [sizes for sizes in observed.get("micro_batch_sizes", ()) if sizes]
    return describe_sizes(ranks) if ranks else observed.get("micro_batch_sizes_reason")


def _attention(observed: ObservedRecord) -> str | None:
    """Return the kernels that ran and, where there are several, the modules that called them."""
    kernel = observed["attention_kernel"]
    sites = observed.get("attention_sites") or {}
    if kernel is None or "+" not in kernel or not sites:
        return kernel
    calls = "; ".join("+".join(kernels) + f" in {site}" for site, kernels in sites.items())
    return f"{kernel} ({calls})"


def _compilation(record: LaunchRecord) -> list[str]:
    """Return what was compiled on the rank that took longest, and a line for each graph break and for what ran uncompiled."""
    compilation = record.get("compilation")
    if not compilation:
        return []
    longest = max(compilation["per_rank"], key=lambda rank: rank["time_s"])
    looked_up = longest["from_cache"] + longest["not_from_cache"]
    cache = f", {longest['from_cache']} of their {looked_up} passes found in the cache" if looked_up else ""
    in_steps = longest["in_measured_steps"]
    late = f", {counted(in_steps, 'compilation')} in measured steps" if in_steps else ""
    return [
        f"{counted(longest['graphs'], 'graph')}, {quantity(longest['time_s'], 's')}{cache}{late}",
        *(f"graph break at {entry['where']}: {entry['reason']} ({entry['count']})" for entry in longest["graph_breaks"]),
        *(f"{entry['function']} was compiled again: {entry['reason']}" for entry in longest["recompilations"]),
        *(
            f"limit reached: {entry['function']} runs uncompiled where no variant fits: {entry['reason']}"
            for entry in longest.get("limits_reached", ())
        ),
        *(f"{entry['function']} ran uncompiled: {entry['reason']}" for entry in longest.get("uncompiled", ())),
    ]


def _compile_times(summary: CellSummary) -> list[str]:
    """Return the time that several launches took to compile, by whether their graphs were in the cache on disk."""
    times: dict[str, list[float]] = {}
    for record in summary.ok:
        ranks = (record.get("compilation") or {"per_rank": []})["per_rank"]
        found, compiled = (sum(rank[key] for rank in ranks) for key in ("from_cache", "not_from_cache"))
        if found or compiled:
            times.setdefault(_GRAPH_SOURCES[bool(found), bool(compiled)], []).append(max(rank["time_s"] for rank in ranks))
    texts = [f"{quantity(median(values), 's')} {kind} ({len(values)})" for kind, values in sorted(times.items())]
    return [f"by launches: {', '.join(texts)}"] if len(texts) > 1 else []


def _settings(settings: Mapping[str, Setting]) -> str:
    return ", ".join(f"{name}={matrix_text(value)}" for name, value in settings.items())


def _data(record: LaunchRecord) -> list[str]:
    """Return one line per dataset, and one for a mode; nothing of a record without a description of the data."""
    data = record.get("data")
    if not data:
        return []
    drawn = sum(dataset["drawn"] or 0 for dataset in data["datasets"])
    lines = [] if data["mode"] == "policy" else [f"mode {data['mode']}"]
    for dataset in data["datasets"]:
        trained = f"{dataset['training_frames']:,} of {dataset['frames']:,} frames"
        parts = [
            f"{trained} at {dataset['fps']:g} frames/s in {dataset['training_episodes']:,} episodes",
            f"source {dataset['source']}",
            f"control mode {dataset['control_mode']}",
        ]
        if dataset["keep"] is not None:
            parts.append(f"{dataset['kept_frames']:,} frames in {dataset['kept_episodes']:,} episodes kept")
        if dataset["validation_episodes"]:
            parts.append(
                f"{dataset['validation_frames']:,} frames in {dataset['validation_episodes']:,} episodes for validation"
            )
        if len(data["datasets"]) > 1 and drawn:
            share = (dataset["drawn"] or 0) / drawn
            parts.append(f"{share:.1%} of the drawn samples, {dataset['share']:.1%} as configured")
        lines.append(f"{dataset['dataset']}: {', '.join(parts)}")
    return lines


def _hosts(state: HostState | None) -> list[str]:
    """Return one line per host and per GPU, and one for the energy of all GPUs; nothing of a record without a host state."""
    if not state:
        return []
    lines = []
    for host in state["hosts"]:
        load = host["load_average"]
        shares = {"launch": "launch_cpu_share", "other processes": "other_cpu_share", "hypervisor": "steal_share"}
        texts = [f"{name} {quantity(host[key], 'fraction', 2)}" for name, key in shares.items()]  # type: ignore[literal-required]
        texts.append(f"load average {UNKNOWN if load is None or load['end'] is None else format(load['end'], '.2f')}")
        lines.append(f"CPU time: {', '.join(texts)}")
    lines += map(_device_state, state["devices"] or ())
    if state["energy_j_per_sample"] is not None:
        lines.append(f"energy of the devices: {quantity(state['energy_j_per_sample'], 'J')} per sample")
    return lines


def _device_state(device: DeviceRecord) -> str:
    """Return clock, power and temperature of a GPU at the start and the end of the steps, and what held its clock back."""
    texts = [
        _start_end("SM clock", device["sm_clock_mhz"], "MHz"),
        _start_end("power", device["power_w"], "W"),
        _start_end("temperature", device["temperature_c"], "°C"),
    ]
    if (reasons := device["throttle_reasons"]) is not None:
        texts.append(f"held back by {', '.join(reasons)}" if reasons else "not held back")
    return f"GPU of rank {device['rank']}: {', '.join(texts)}"


def _start_end(name: str, span: StartEnd | None, unit: str) -> str:
    if span is None:
        return f"{name} {UNKNOWN}"
    start, end = (UNKNOWN if value is None else format(value, ".0f") for value in (span["start"], span["end"]))
    return f"{name} {start} to {end} {unit}"


def _collectives(collectives: Mapping[str, CollectiveRecord] | None) -> str | None:
    if collectives is None:
        return None
    texts = (f"{calls['count']} {name} of {quantity(calls['bytes'], 'bytes')} in all" for name, calls in collectives.items())
    return ", ".join(texts) or "none"


def _flops(flops: Flops | None) -> str | None:
    if flops is None:
        return None
    if flops["model_flops_per_step"] is None:
        return flops["reason"]
    return _flops_text(flops["model_flops_per_step"], flops.get("recomputed_flops_per_step"))


def _tower_flops(flops: Flops | None) -> str:
    towers = (flops.get("per_tower") if flops else None) or {}
    return "; ".join(
        f"{name} {_flops_text(tower['forward'] + tower['backward'], tower['recomputed'])}" for name, tower in towers.items()
    )


def _flops_text(model: int, recomputed: int | None) -> str:
    suffix = f", {quantity(recomputed, 'FLOP')} recomputed" if recomputed else ""
    return quantity(model, "FLOP") + suffix


def _recomputed_modules(count: int | None) -> str | None:
    return None if count is None else f"{counted(count, 'module')} recomputed"


def _trainable_share(observed: ObservedRecord) -> str | None:
    # In records without `trainable_numel`, the total counts trainable parameters only.
    trainable, total = observed.get("trainable_numel"), observed["total_numel"]
    return None if trainable is None else f"{trainable:,} of {total:,} elements"
