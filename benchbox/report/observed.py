"""The part of a report that sets what was observed in each cell beside what was requested of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.summary import CellSummary, label, plain
from benchbox.registry.weights import in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing observed, beside what was requested of it, where anything was."""

    what: str
    requested: str | None
    observed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was observed in a cell."""

    cell: str
    facts: tuple[Fact, ...]


def requested_and_observed(summaries: Sequence[CellSummary], axes: Sequence[str]) -> tuple[Seen, ...]:
    """Every cell of which a launch got as far as to observe anything."""
    return tuple(_seen(summary, summary.evidence, axes) for summary in summaries if summary.evidence is not None)


def _seen(summary: CellSummary, record: Mapping[str, Any], axes: Sequence[str]) -> Seen:
    cell, observed = summary.cell, record["observed"]
    chain = " > ".join(observed.get("optimizer_chain") or [])
    shards = [count for count in observed.get("shard_numel") or [] if count is not None]
    facts: tuple[tuple[str, Any, Any], ...] = (
        ("backend", cell["backend"], observed.get("backend")),
        ("model", None, observed.get("model_class")),
        ("sharding", None, observed.get("sharding")),
        ("shard elements, by rank", None, ", ".join(f"{count:,}" for count in shards)),
        ("ranks", cell["world_size"], observed.get("world_size")),
        ("device", None, ", ".join(dict.fromkeys(str(device) for device in observed.get("device") or []))),
        ("attention", cell["attention"], observed.get("attention_kernel")),
        ("checkpointing", plain(cell["checkpointing"]), _modules(observed.get("checkpointed_modules"))),
        ("parameters that train", cell.get("freeze"), _share(observed.get("trainable_numel"), observed.get("total_numel"))),
        *([("published weights", weights, in_words(observed.get("weights")))] if (weights := cell.get("weights")) else []),
        ("optimizer", None, chain),
        ("collectives in a step", None, _collectives(record["collectives"])),
        ("FLOPs of a step", None, _flops(record["flops"])),
        ("FLOPs by tower, by formula", None, _towers(record["flops"])),
        ("final loss", None, quantity(_value(summary, "final_loss"), "loss")),
    )
    return Seen(cell=label(cell, axes), facts=tuple(_fact(*fact) for fact in facts))


def _fact(what: str, requested: Any, observed: Any) -> Fact:
    return Fact(
        what=what,
        requested=None if requested is None else str(requested),
        observed=UNKNOWN if observed in (None, "") else str(observed),
    )


def _collectives(seen: Mapping[str, Any] | None) -> str | None:
    if seen is None:
        return None
    each = (f"{entry['count']} {name} of {quantity(entry['bytes'], 'bytes')} in all" for name, entry in seen.items())
    return ", ".join(each) or "none"


def _flops(flops: Mapping[str, Any] | None) -> str | None:
    if flops is None or flops["model_flops_per_step"] is None:
        return (flops or {}).get("reason")
    return _work(flops["model_flops_per_step"], flops.get("recomputed_flops_per_step"))


def _towers(flops: Mapping[str, Any] | None) -> str:
    towers = (flops or {}).get("per_tower") or {}
    return "; ".join(f"{name} {_work(cost['forward'] + cost['backward'], cost['recomputed'])}" for name, cost in towers.items())


def _work(model: int, recomputed: int | None) -> str:
    again = f", {quantity(recomputed, 'FLOP')} recomputed" if recomputed else ""
    return quantity(model, "FLOP") + again


def _modules(count: int | None) -> str | None:
    return None if count is None else f"{count} modules recomputed"


def _share(part: int | None, whole: int | None) -> str | None:
    # Without the first the record is of an older benchbox, whose whole was of what trains.
    return None if part is None or whole is None else f"{part:,} of {whole:,} elements"


def _value(summary: CellSummary, metric: str) -> float | None:
    spread = summary.values[metric]
    return None if spread is None else spread.value
