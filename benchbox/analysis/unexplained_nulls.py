"""Evidence that a launch which ended ok must have, and the reasons for which a record may lack a part of it.

Most invariants do not apply where what they check is null. This one keeps a record from passing because of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from benchbox.registry.launch_record import LaunchRecord

# Every rank that ends ok writes them, whatever its device, backend and recipe.
_REQUIRED = (
    "observed",
    "step_time_s",
    "phases_s",
    "throughput",
    "memory",
    "collectives",
    "flops",
    "precision",
    "samples",
    "loss",
    "grad_norm",
    "environment",
)
_REQUIRED_LATER = ("host", "data")  # absent from records that predate them
_MAY_BE_EMPTY = ("collectives",)  # those of one rank


def no_unexplained_null(record: LaunchRecord) -> Iterable[str] | None:
    """Return what is null or empty in a record without a reason."""
    if record["status"] != "ok":
        return [] if record["error"] else ["not ok, and no error says why"]
    return [f"{key} is {'null' if value is None else 'empty'} without a reason" for key, value in _missing(record)]


def _missing(record: LaunchRecord) -> Iterator[tuple[str, Any]]:
    """Yield every key, and its value, at which an ok record lacks evidence without a reason."""
    values: Mapping[str, Any] = record
    for key in (*_REQUIRED, *(key for key in _REQUIRED_LATER if key in values)):
        if values[key] is None or (not values[key] and key not in _MAY_BE_EMPTY):
            yield key, values[key]
    yield from _unknown(values, ("mfu", "hfu"), record["mfu_reason"])
    yield from _unknown(values, ("step_split_s",), record.get("step_split_reason"))
    yield from _missing_observations(record)
    yield from _missing_peaks(record)
    if record["flops"]:
        yield from _unknown(
            record["flops"], ("model_flops_per_step", "recomputed_flops_per_step"), record["flops"]["reason"], "flops."
        )
        if "per_tower_reason" in record["flops"]:
            yield from _unknown(record["flops"], ("per_tower",), record["flops"]["per_tower_reason"], "flops.")
    if record["precision"] and not record["precision"]["census"] and not record["precision"].get("problems"):
        yield "precision.census", record["precision"]["census"]
    yield from _missing_host_state(record)


def _unknown(
    values: Mapping[str, Any], keys: Iterable[str], reason: str | None, prefix: str = ""
) -> Iterator[tuple[str, None]]:
    """Yield the keys that are there and null, unless there is a reason. Older records lack keys."""
    if not reason:
        yield from ((f"{prefix}{key}", None) for key in keys if key in values and values[key] is None)


def _missing_observations(record: LaunchRecord) -> Iterator[tuple[str, None]]:
    """Yield observations that the probe of an ok launch always makes. Without attention there is no kernel, at no site."""
    observed = record["observed"]
    if not observed:
        return
    if observed["checkpointed_modules"] is None:
        yield "observed.checkpointed_modules", None
    if observed["attention_kernel"] is None and observed.get("attention_sites"):
        yield "observed.attention_kernel", None
    if not all(observed.get("micro_batch_sizes", ())) and not observed.get("micro_batch_sizes_reason"):
        yield "observed.micro_batch_sizes", None
    for key in ("shard_numel", "device"):
        if None in observed[key]:
            yield f"observed.{key}", None


def _missing_peaks(record: LaunchRecord) -> Iterator[tuple[str, None]]:
    memory = record["memory"]
    if not memory:
        return
    is_device = memory["source"] == "torch.cuda"
    # Without counters of a device, what compiled code allocates is not seen, and nothing is reserved.
    may_be_null = {
        "allocated_peak_bytes": not is_device and record["cell"].get("compile", "off") != "off",
        "reserved_peak_bytes": not is_device,
    }
    for key, is_allowed in may_be_null.items():
        if any(peak[key] is None for peak in memory["per_rank"]) and not (is_allowed and memory["reason"]):  # type: ignore[literal-required]
            yield f"memory.{key}", None


def _missing_host_state(record: LaunchRecord) -> Iterator[tuple[str, Any]]:
    state = record.get("host")
    if not state:
        return
    if not state["hosts"]:
        yield "host.hosts", state["hosts"]
    yield from _unknown(state, ("devices",), state["devices_reason"], "host.")
    for kind, parts in (("hosts", state["hosts"]), ("devices", state["devices"] or [])):
        for number, part in enumerate(parts):
            unknown = [key for key in part if key not in part["reasons"]]
            yield from _unknown(part, unknown, None, f"host.{kind}.{number}.")
