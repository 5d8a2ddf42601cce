"""The parts of a report beside its table and charts: findings, what was observed, what went wrong, where, and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import UNKNOWN, quantity
from benchbox.analysis.summary import CellSummary, label, plain
from benchbox.registry.metrics import METRICS
from benchbox.store.table import flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A launch that did not end ok, or a planned cell that has none. `details` may run over lines (a traceback)."""

    cell: str
    status: str
    message: str
    where: str
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding of the precision audit, and the cells it fired in."""

    code: str
    severity: str
    title: str
    where: str
    repair: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How a number was made, from the metric's declaration."""

    name: str
    unit: str
    better: str
    formula: str
    launches: str


def findings(summaries: Sequence[CellSummary], axes: Sequence[str]) -> tuple[FindingView, ...]:
    """Findings of all cells; one that fired in several cells is named once, with its cells."""
    found: dict[tuple[str, ...], list[str]] = {}
    for summary in summaries:
        for finding in ((summary.evidence or {}).get("precision") or {}).get("findings") or []:
            key = tuple(str(finding.get(part) or "") for part in ("code", "severity", "title", "where", "repair"))
            found.setdefault(key, []).append(label(summary.cell, axes))
    return tuple(
        FindingView(code=code, severity=severity, title=title, where=where, repair=repair, cells=tuple(dict.fromkeys(cells)))
        for (code, severity, title, where, repair), cells in found.items()
    )


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


def troubles(summaries: Sequence[CellSummary], axes: Sequence[str]) -> Iterable[Trouble]:
    """Launches that did not end ok, and cells that have not run."""
    for summary in summaries:
        name = label(summary.cell, axes)
        if not summary.records:
            yield Trouble(cell=name, status=summary.status, message="it has not run", where="", details="")
        for record in summary.records:
            if record["status"] == "ok":
                continue
            error = record["error"] or {}
            rank = "" if error.get("rank") is None else f"rank {error['rank']}"
            where = ", ".join(part for part in (f"launch {record['launch']}", rank, error.get("phase")) if part)
            message = f"{error.get('type')}: {error.get('message')}" if error else "no reason was recorded"
            yield Trouble(
                cell=name, status=record["status"], message=message, where=where, details=error.get("traceback") or ""
            )


def environment(summaries: Sequence[CellSummary]) -> tuple[tuple[str, str], ...]:
    """Every value seen in an ok launch; several where launches differ."""
    seen: dict[str, list[str]] = {}
    for summary in summaries:
        for record in summary.ok:
            for key, value in flat_text(record["environment"] or {}):
                values = seen.setdefault(key, [])
                if value not in values:
                    values.append(value)
    return tuple((key, " | ".join(values)) for key, values in seen.items())


def flat_text(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Nested values on one level, as text: `optim.lr`."""
    return tuple(
        (key, UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value))
        for key, value in flat(values).items()
    )


def method() -> tuple[Method, ...]:
    """Every metric's declaration, in words."""
    better = {"lower": "less is better", "higher": "more is better", "none": "neither way is better"}
    return tuple(
        Method(
            name=metric.name,
            unit=metric.unit,
            better=better[metric.direction],
            formula=metric.formula,
            launches="the worst launch" if metric.launches == "worst" or not metric.is_number else "the median launch",
        )
        for metric in METRICS.values()
    )
