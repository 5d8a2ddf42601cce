"""`benchbox audit-precision`: what a set-up really stores and steps, and what is wrong with it."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchbox.cli.options import Format, FormatOption, PolicyDirOption
from benchbox.errors import CellFailedError, ConfigurationError, Problem, ThresholdError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.spec.cell import Cell


class Data(StrEnum):
    synthetic = "synthetic"
    sample = "sample"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("audit-precision")(audit_precision)


def audit_precision(
    policy: Annotated[str, typer.Option(metavar="NAME", help="The policy to audit.")],
    backend: Annotated[str, typer.Option(metavar="NAME", help="Who shards and reduces: see benchbox list backends.")],
    recipe: Annotated[str, typer.Option(metavar="NAME", help="The precision arrangement: see benchbox list recipes.")],
    policy_dirs: PolicyDirOption,
    size: Annotated[str, typer.Option(help="The policy's preset.")] = "tiny",
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks.", show_default="the fewest that the backend takes")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before the one that is looked at.")] = 3,
    beta2: Annotated[float | None, typer.Option(min=0.0, help="AdamW's second beta.", show_default="that of a matrix")] = None,
    data: Annotated[Data, typer.Option(help="What to step on.")] = Data.synthetic,
    output: FormatOption = Format.text,
) -> None:
    """Run a few steps on real ranks and report every dtype they touched: parameters, gradients, masters and optimizer state.

    Exit code 4 when a rule finds an error or cannot be judged, 3 when the steps themselves failed.
    """
    cell = _cell(policy, size, backend, recipe, world_size, beta2, data, policy_dirs)
    record = _measured(cell, steps, policy_dirs)
    census, findings = record["precision"]["census"], record["precision"]["findings"]
    if output is Format.json:
        typer.echo(json.dumps({"cell": cell.to_dict(), "observed": record["observed"], **record["precision"]}, indent=1))
    else:
        from rich.console import Console

        _show(Console(highlight=False), cell, record["observed"], census, findings)

    from benchbox.audit.findings import failing

    if codes := sorted({finding["code"] for finding in failing(findings)}):
        raise ThresholdError(f"{backend} with {recipe} does not pass {', '.join(codes)}")


def _cell(
    policy: str,
    size: str,
    backend: str,
    recipe: str,
    world_size: int | None,
    beta2: float | None,
    data: Data,
    policy_dirs: Sequence[Path],
) -> "Cell":
    from benchbox.registry.backends import backend_info
    from benchbox.registry.names import did_you_mean
    from benchbox.registry.policies import policy_entry
    from benchbox.registry.recipes import RECIPES
    from benchbox.spec.cell import Cell, DataSpec, OptimSpec

    entry, info = policy_entry(policy, policy_dirs), backend_info(backend)
    if size not in entry.presets:
        raise ConfigurationError(Problem("--size", f"policy {policy} has no size {size!r}", did_you_mean(size, entry.presets)))
    if recipe not in RECIPES:
        raise ConfigurationError(Problem("--recipe", f"unknown recipe {recipe!r}", did_you_mean(recipe, RECIPES)))
    ranks = info.min_ranks if world_size is None else world_size
    if refusal := info.refusal(world_size=ranks, recipe=recipe, checkpointing=False):
        raise UnsupportedError(refusal)
    optim = OptimSpec()
    if beta2 is not None:
        if beta2 >= 1.0:
            raise ConfigurationError(Problem("--beta2", f"{beta2} would never forget a gradient", "give a value below 1"))
        optim = OptimSpec(betas=(optim.betas[0], beta2))
    return Cell(
        policy=policy,
        size=size,
        backend=backend,
        recipe=recipe,
        world_size=ranks,
        batch=1,
        data=DataSpec(kind=data.value, workers=0),
        optim=optim,
    )


def _measured(cell: "Cell", steps: int, policy_dirs: Sequence[Path]) -> Mapping[str, Any]:
    """The record of one launch of the cell. What the ranks leave is kept only when they fail."""
    from benchbox.launch.local import LocalLauncher
    from benchbox.launch.once import launch_once
    from benchbox.launch.stop import stop_on_signals
    from benchbox.spec.cell import MeasureSpec

    folder = Path(tempfile.mkdtemp(prefix="benchbox-audit-"))
    measure = MeasureSpec(warmup_steps=0, steps=steps, launches=1)
    with stop_on_signals() as stop:
        record = launch_once(
            cell, measure, launch=1, folder=folder / "launch", launcher=LocalLauncher(), policy_dirs=policy_dirs, stop=stop
        )
    if record["status"] == "interrupted":
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if record["status"] != "ok":
        error = record["error"] or {}
        where = "".join(f" {key} {error[key]}" for key in ("rank", "phase") if error.get(key) is not None)
        raise CellFailedError(f"{record['status']}{where}: {error.get('type')}: {error.get('message')}; logs: {folder}")
    shutil.rmtree(folder)
    return record


def _show(
    console: "Console",
    cell: "Cell",
    observed: Mapping[str, Any],
    census: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
) -> None:
    from benchbox.analysis.quantities import quantity
    from benchbox.audit.findings import finding_lines
    from benchbox.audit.rules import rules
    from benchbox.report.rows import print_rows, say

    ranks: dict[tuple[Any, ...], list[int]] = {}
    for entry in census:
        key = tuple(entry[name] for name in ("kind", "dtype", "device", "tensors", "elements", "bytes"))
        ranks.setdefault(key, []).append(entry["rank"])
    rows = [
        (_span(held), kind, dtype, device, str(tensors), f"{elements:,}", quantity(size, "bytes"))
        for (kind, dtype, device, tensors, elements, size), held in ranks.items()
    ]
    ranks_text = "1 rank" if cell.world_size == 1 else f"{cell.world_size} ranks"
    say(console, f"{cell.policy} {cell.size}, {observed['backend']}, {cell.recipe}, {ranks_text}")
    say(console, f"stepped by {' > '.join(observed['optimizer_chain'])}, beta2 {cell.optim.betas[1]}")
    say(console)
    print_rows(
        console,
        ("ranks", "kind", "dtype", "device", "tensors", "elements", "bytes"),
        rows,
        right=("tensors", "elements", "bytes"),
    )
    for finding in findings:
        say(console)
        for line in finding_lines(finding):
            say(console, line)
    if held := sorted(rules().keys() - {finding["code"] for finding in findings}):
        say(console)
        say(console, f"clean: {', '.join(held)}")


def _span(ranks: Sequence[int]) -> str:
    """`0-3` for neighbours, `0, 2` otherwise."""
    first, last = min(ranks), max(ranks)
    if len(ranks) > 1 and len(set(ranks)) == last - first + 1:
        return f"{first}-{last}"
    return ", ".join(map(str, sorted(ranks)))
