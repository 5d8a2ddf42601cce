"""Run directories of random content: `python -m tests.support.random_runs SEED DIR` writes one.

Speeds, noise, failures, marks, environments and texts meet here in ways that nobody has thought of, and the true time of a
step of every cell is known. Records go through `assemble_record`, like real ones.
"""

from __future__ import annotations

import random
import sys
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import product
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.spec.cell import Cell, MeasureSpec
from benchbox.store.assemble import assemble_record
from benchbox.store.run import Run, RunStore
from tests.support.example_run import OOM, SHARES, example_host, example_precision, rank_result

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = (  # of policies, which are folders
    "plain",
    "größe 拿起",
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m",
    "two\nlines | of a table",
    "[bold]markup[/bold] `code` **stars**",
    "a\u2028b\u202ec",
    "{{ 7 * 7 }} ${x} %s",
)
TEXTS = (*NAMES, "::error file=x::injected", "caf\udce9", "long " * 60)  # of paths, reasons and messages
AXES: dict[str, tuple[Any, ...]] = {
    "backend": ("ddp", "fsdp1_full", "fsdp2", "zero1", "zero2", "zero3", "single"),
    "cams": (1, 2, 4),
    "batch": (1, 2, 8, 4096),
    "attention": ("sdpa", "eager"),
    "checkpointing": (False, True),
    "recipe": ("bf16_master", "fp32"),
    "seed": (0, 1, 2),
    "accumulation": (1, 3),
}
FAILURES = ("oom", "timeout", "hang", "desync", "nan", "crash", "mismatch", "unsupported", "interrupted")
COMPILED = {
    "graphs": 3,
    "graph_breaks": [{"where": "policy.py:12", "reason": "<b>print</b>", "count": 2}],
    "recompilations": [{"function": "forward", "reason": "size mismatch"}],
    "limits_reached": [],
    "uncompiled": [{"function": "forward", "reason": "a loop"}],
    "time_s": 4.5,
    "from_cache": 1,
    "not_from_cache": 5,
    "in_measured_steps": 1,
}
ADDED_LATER = ("compilation", "hfu", "step_split_s", "step_split_reason", "host", "data", "unchecked_reason", "skipped_steps")
KINDS = ("of one machine", "of one machine", "compiled", "of an older version", "of two machines", "of two commits")
DAY = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class RandomRun:
    """A run that was written, and the true seconds of a step of each of its cells, by id."""

    store: RunStore
    run: Run
    records: tuple[dict[str, Any], ...]  # in the order in which they were measured
    step_s: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class _Noise:
    """Noise of the time of a step."""

    launches: float  # standard deviations of logarithms
    steps: float
    drift: float  # of the machine from one launch to the next
    outliers: float  # share of launches that something disturbed


def write_random_run(path: Path, seed: int, *, factor: float = 1.0, start: datetime = DAY, failing: bool = True) -> RandomRun:
    """Write a run that is a function of the seed.

    Args:
        factor: of all times.
        start: of the first launch.
        failing: whether launches may fail or be missing.
    """
    draw = random.Random(seed)
    cells = _cells(draw)
    launches = draw.choice((1, 1, 2, 3, 5, 6, 7, 10, 20)) if len(cells) < 20 else draw.choice((1, 2, 5))
    measure = MeasureSpec(warmup_steps=draw.choice((1, 3)), steps=draw.choice((2, 3, 10)), launches=launches)
    fields = [field for field in AXES if len({cell.to_dict()[field] for cell in cells}) > 1]
    axis = draw.choice([*fields, None]) if fields else None
    skipped = [{"cell": replace(cells[0], seed=99).to_dict(), "reason": draw.choice(TEXTS)}] if draw.random() < 0.2 else []
    run = Run(
        name="random",
        matrix_file=f"matrices/{draw.choice(TEXTS)}.yaml",
        matrix={"policy": cells[0].policy, "axes": {field: list(AXES[field]) for field in fields}},
        reference={axis: cells[0].to_dict()[axis]} if axis else {},
        thresholds=[
            {"metric": "step_time_s", "where": {}, "vs": "baseline", "max_regression": 0.05},
            {"metric": "peak_allocated_bytes", "where": {}, "max": 2**34},
            {"metric": "status", "where": {}, "expect": "ok"},
        ],
        measure=asdict(measure),
        cells={cell.cell_id: cell.to_dict() for cell in cells},
        skipped=skipped,
        created_at=start.isoformat(),
    )
    scale = draw.choice((1.0, 1.0, 1e-5, 1e4))
    step_s = {cell.cell_id: factor * scale * draw.choice((0.2, 0.2, 0.204, 0.21, 0.24, 2.0)) for cell in cells}
    store = RunStore(path)
    store.write_run(run)
    records = _measure(draw, cells, measure, step_s, start, failing=failing)
    for record in records:
        store.write_record(record)
    if draw.random() < 0.2:
        with store.chain.path.open("a") as chain:
            chain.write('{"kind": "rec')  # of a machine that stopped
    return RandomRun(store=store, run=run, records=tuple(records), step_s=step_s)


def _cells(draw: random.Random) -> list[Cell]:
    count = draw.choice((1, 2, 3, 5, 8, 12, 45))
    policies = ("example", draw.choice(NAMES)) if draw.random() < 0.3 else ("example",)
    varied = {field: AXES[field] for field in draw.sample(sorted(AXES), draw.randint(1, 4))}
    points = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    base = Cell(policy="example", size=draw.choice(("tiny", "full")), backend="ddp", world_size=2, batch=2)
    cells = [
        replace(base, policy=policy, **point | ({"world_size": 1} if point.get("backend") == "single" else {}))
        for policy, point in product(policies, points)
        if (point.get("backend"), point.get("checkpointing")) != ("zero3", True)  # which it refuses
    ]
    return draw.sample(cells, min(count, len(cells)))


def _measure(
    draw: random.Random,
    cells: Sequence[Cell],
    measure: MeasureSpec,
    step_s: dict[str, float],
    start: datetime,
    *,
    failing: bool,
) -> list[dict[str, Any]]:
    """Return the records of all launches, in rounds whose order alternates, as `benchbox run` makes them."""
    noise = _Noise(
        launches=draw.choice((0.0, 0.001, 0.01, 0.05, 0.3)),
        steps=draw.choice((0.0, 0.01, 0.1)),
        drift=draw.choice((0.0, 0.0, 0.02)),
        outliers=draw.choice((0.0, 0.0, 0.1)),
    )
    failures = {cell.cell_id: _failure(draw) if failing and draw.random() < 0.2 else None for cell in cells}
    kind = draw.choice(KINDS)
    records, machine_factor, time = [], 1.0, start
    for launch in range(1, measure.launches + 1):
        for cell in cells if launch % 2 else reversed(cells):
            machine_factor *= exp(draw.gauss(0, noise.drift))
            disturbed = draw.uniform(1.2, 3) if draw.random() < noise.outliers else 1.0
            true_s = step_s[cell.cell_id] * machine_factor * exp(draw.gauss(0, noise.launches)) * disturbed
            ranks = _ranks(draw, cell, measure, true_s, noise.steps)
            duration_s = 30.0 + 2 * measure.steps * max(max(result["step_time_s"]) for result in ranks)
            time += timedelta(seconds=duration_s + 10)
            status, failed_launch, error = failures[cell.cell_id] or ("ok", 0, None)
            if status == "missing" and launch >= failed_launch:
                continue
            fails = status != "missing" and failed_launch == launch
            is_second = launch > 2
            environment = {
                "policy_sha256": str(int(kind == "of two commits" and is_second)) * 64,
                "launcher": "local",
                "variables": {"LD_PRELOAD": None},
            }
            for result in ranks:
                result["environment"]["machine"] = "another" if kind == "of two machines" and is_second else "a-machine"
                result["compilation"] = COMPILED if kind == "compiled" else None
            record = assemble_record(
                cell=cell,
                launch=launch,
                measure=measure,
                rank_results=[] if fails else ranks,
                status=status if fails else "ok",
                error=error if fails else None,
                started_at=(time - timedelta(seconds=duration_s + 5)).isoformat(),
                duration_s=duration_s,
                precision=example_precision(cell),
                environment=environment,
            )
            old = ADDED_LATER if kind == "of an older version" else ()
            records.append({key: value for key, value in record.items() if key not in old})
    return records


def _failure(draw: random.Random) -> tuple[str, int, dict[str, Any] | None]:
    """Return the status of a cell that fails, in which launch, and its error."""
    status = draw.choice((*FAILURES, "missing"))
    error = OOM if status == "oom" else {"type": "RuntimeError", "message": draw.choice(TEXTS), "rank": 0, "phase": None}
    return status, draw.choice((1, 1, 2)), {"traceback": draw.choice((None, *TEXTS)), **error}


def _ranks(draw: random.Random, cell: Cell, measure: MeasureSpec, true_s: float, step_noise: float) -> list[dict[str, Any]]:
    """Return the results of the ranks of a launch, of which the last one is the slowest."""
    results = []
    for rank in range(cell.world_size):
        is_slowest = rank == cell.world_size - 1
        steps = [true_s * (1 if is_slowest else 0.9) * exp(draw.gauss(0, step_noise)) for _ in range(measure.steps)]
        result = rank_result(cell, rank)
        shares = {phase: SHARES[phase] for phase in result["phases_s"]}
        losses = [2.0 / (step + 1) for step in range(measure.warmup_steps + measure.steps)]
        results.append(
            result
            | {
                "step_time_s": steps,
                "phases_s": {phase: [step * share / sum(shares.values()) for step in steps] for phase, share in shares.items()},
                "samples": cell.batch * cell.accumulation * measure.steps,
                "loss": losses,
                "grad_norm": losses,
                "host": example_host(rank, window_s=sum(steps)),
            }
        )
    return results


if __name__ == "__main__":
    write_random_run(Path(sys.argv[2]), int(sys.argv[1]))
