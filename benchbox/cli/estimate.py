"""`benchbox estimate`: memory, communication and time by theory, before anything runs or beside what was measured."""

import json
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from benchbox.cli.links import read_measured_link
from benchbox.cli.options import Format, FormatOption, OnlyOption, PolicyDirOption, SetOption
from benchbox.theory.links import MEASURED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.cli.predicting import Predictions
    from benchbox.launch.simulated_ranks import Simulation
    from benchbox.plan import Plan
    from benchbox.spec.cell import Cell
    from benchbox.theory.links import Device, Link, MeasuredLink
    from benchbox.theory.prediction import Estimate

    Hardware = tuple[Device, Link | MeasuredLink | None]


class DeviceKind(StrEnum):
    """Values of `--device`."""

    cpu = "cpu"
    cuda = "cuda"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("estimate")(estimate)


def estimate(
    target: Annotated[Path, typer.Argument(metavar="MATRIX|RUN", help="A matrix, or a run directory.", show_default=False)],
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    device: Annotated[
        DeviceKind | None,
        typer.Option(
            "--device",
            help="Where the ranks of a matrix would run.",
            show_default="cuda with --accelerator or a GPU in this machine, else cpu",
        ),
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option("--accelerator", metavar="NAME", help="Bound the time of a step on: a100, h100, h200.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link",
            metavar="NAME",
            help="Link between ranks: nvlink3, nvlink4, pcie4, pcie5, infiniband_hdr, infiniband_ndr; or measured. Cells of "
            "one rank need none.",
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the code of each backend as rank 0 of all, and compare.")
    ] = False,
    format_: FormatOption = Format.text,
) -> None:
    """Predict memory by component, collectives and the bounds of a step's time, for every cell of a matrix.

    No rank is started and no device is needed, for any number of ranks. Of a run directory, the predictions are written into it
    as predictions.json, printed beside the measurements, and part of its report from then on.

    Where `benchbox doctor --links` has measured the links of this machine, they bound communication unless --link names others.
    """
    from benchbox.errors import ConfigurationError

    if target.is_dir():
        if sets or only or simulate or device or accelerator or link:
            options = "--set, --only, --simulate, --device, --accelerator and --link"
            raise ConfigurationError(f"{target} is a run directory: {options} are for a matrix")
        _estimate_run(target, policy_dirs, format_)
        return
    from benchbox.cli.predicting import local_device, predict_cells

    kind: Literal["cpu", "cuda"] = device.value if device is not None else "cuda" if accelerator else local_device()
    if accelerator is not None and kind == "cpu":
        raise ConfigurationError(f"--device cpu contradicts --accelerator {accelerator}, a GPU: leave one of them out")
    measured = None if link not in (None, MEASURED) else read_measured_link(kind)
    if link == MEASURED and measured is None:
        raise ConfigurationError(f"--link measured: no link of a {kind} of this machine; benchbox doctor --links measures")
    if measured is None and link is not None and accelerator is None:
        raise ConfigurationError("the time of a step needs --accelerator and --link, and only --link is given")
    from benchbox.plan import join_expressions
    from benchbox.plan import plan as plan_cells
    from benchbox.spec import load_matrix, parse_overrides

    hardware = None if accelerator is None else _hardware(accelerator, measured or link)
    loaded = load_matrix(target, parse_overrides(sets), policy_dirs)
    planned = plan_cells(loaded, join_expressions(only))
    cells = planned.cells
    if accelerator and not (measured or link) and any(cell.world_size > 1 for cell in cells):
        raise ConfigurationError("the time of a step of several ranks needs --accelerator and --link, and --link is not given")
    # A simulation repeats one step.
    step = None if simulate else loaded.measure.probed_step
    predictions = predict_cells(cells, loaded.policy_dirs, step, kind)
    simulations = _simulate(cells, loaded.policy_dirs) if simulate else {}
    if format_ is Format.json:
        rows = [_as_json(cell, predictions[cell.cell_id], hardware, measured) for cell in cells]
        for row in rows if simulate else ():
            simulation = simulations[row["cell_id"]]
            row["simulation"] = {"reason": simulation} if isinstance(simulation, str) else asdict(simulation)
        rows += [_as_json(skip.cell, f"skipped: {skip.reason}", hardware, measured) for skip in planned.skipped]
        print(json.dumps(rows, indent=2))
    else:
        _print_cells(planned, predictions, simulations, hardware, measured)


def _simulate(cells: "Sequence[Cell]", policy_dirs: "Sequence[Path]") -> "Mapping[str, Simulation | str]":
    """Return the simulation of each cell, or why there is none."""
    from benchbox.errors import UnsupportedError
    from benchbox.launch.process.environment import host_variables
    from benchbox.launch.simulated_ranks import simulate_cells

    simulations = simulate_cells(cells, policy_dirs, {**os.environ, **host_variables(os.environ)})
    return {key: str(entry) if isinstance(entry, UnsupportedError) else entry for key, entry in simulations.items()}


def _describe_simulation(simulation: "Simulation | str", entry: "Estimate") -> str:
    """Return whether a simulation confirms the formulas, as text."""
    if isinstance(simulation, str):
        return f"not simulated: {simulation}"
    differences = simulation.differences(entry)
    verdict = (
        "differs: " + "; ".join(differences) if differences else "equals the formulas in every collective and parameter byte"
    )
    return f"simulated as rank 0 of {entry.world_size} on {simulation.tensors} tensors: {verdict}"


def _hardware(accelerator: str, link: "str | MeasuredLink | None") -> "Hardware":
    from benchbox.errors import ConfigurationError, Problem
    from benchbox.registry.names import did_you_mean
    from benchbox.theory.links import DEVICES, LINKS

    for option, name, known in (("--accelerator", accelerator, DEVICES), ("--link", link, LINKS)):
        if isinstance(name, str) and name not in known:
            raise ConfigurationError(Problem(option, f"unknown name {name!r}", did_you_mean(name, known)))
    return DEVICES[accelerator], LINKS[link] if isinstance(link, str) else link


def _as_json(
    cell: "Cell", entry: "Estimate | str", hardware: "Hardware | None", measured: "MeasuredLink | None"
) -> dict[str, Any]:
    values: dict[str, Any] = {"cell_id": cell.cell_id, "cell": cell.to_dict()}
    if isinstance(entry, str):
        return {**values, "prediction": None, "reason": entry}
    values["prediction"] = entry.to_dict()
    if hardware is not None:
        lower, upper = entry.step_time_s(*hardware)
        values["step_time_s"] = {"lower": lower, "upper": upper}
    if measured is not None:
        values["communication_time_s"] = {"link": measured.name, "upper": entry.communication_time_s(measured)}
    return values


def _print_cells(
    planned: "Plan",
    predictions: "Predictions",
    simulations: "Mapping[str, Simulation | str]",
    hardware: "Hardware | None",
    measured: "MeasuredLink | None",
) -> None:
    """Print one line for each cell, and below it the components of its peak and its collectives, or why it is skipped."""
    from benchbox.analysis.quantities import quantity
    from benchbox.analysis.summary import label, varying_fields

    fields = varying_fields(cell.to_dict() for cell in (*planned.cells, *(skip.cell for skip in planned.skipped)))
    for cell in planned.cells:
        entry = predictions[cell.cell_id]
        typer.secho(f"{cell.cell_id}  {label(cell.to_dict(), fields)}", bold=True)
        if isinstance(entry, str):
            print(f"  no prediction: {entry}")
            continue
        components = ", ".join(f"{name} {quantity(size, 'bytes')}" for name, size in entry.components.items())
        print(f"  peak {quantity(entry.peak_bytes, 'bytes', 4)} in {entry.moment}: {components}")
        collectives = [
            f"{name} {traffic['count']} x, {quantity(traffic['bytes'], 'bytes')}" for name, traffic in entry.collectives.items()
        ]
        print(f"  communication of a step: {'; '.join(collectives) or 'none'}")
        if cell.cell_id in simulations:
            print(f"  {_describe_simulation(simulations[cell.cell_id], entry)}")
        if measured is not None and entry.world_size > 1:
            seconds = quantity(entry.communication_time_s(measured), "s")
            print(f"  communication on the {measured.name} link: {seconds}, if none of it overlaps with computation")
        if hardware is not None:
            lower, upper = (quantity(seconds, "s") for seconds in entry.step_time_s(*hardware))
            if entry.world_size > 1:
                print(f"  step: {lower} to {upper}, as communication overlaps wholly or not at all")
            else:
                print(f"  step: {lower}, as one rank does not communicate")
        for note in entry.notes:
            print(f"  {note}")
    for skip in planned.skipped:
        typer.secho(f"{skip.cell.cell_id}  {label(skip.cell.to_dict(), fields)}", bold=True)
        print(f"  skipped: {skip.reason}")
    device, link = hardware or (None, measured)
    has_links = any(cell.world_size > 1 for cell in planned.cells)
    sources = [entry for entry in (device, link if has_links else None) if entry is not None]
    if sources:
        print("\n" + "\n".join(f"{entry.name}: {entry.source}" for entry in sources))


def _estimate_run(folder: Path, policy_dirs: "Sequence[Path]", format_: Format) -> None:
    from benchbox.analysis.baseline import slug
    from benchbox.analysis.quantities import quantity
    from benchbox.analysis.reconciliation import reconcile
    from benchbox.analysis.step_bounds import step_bounds
    from benchbox.analysis.summary import label, summarize, varying_fields
    from benchbox.cli.predicting import predict_run
    from benchbox.store.links import read_links
    from benchbox.store.peaks import read_peaks
    from benchbox.store.predictions import read_predictions
    from benchbox.store.run import RunStore

    path = predict_run(folder, policy_dirs)
    store = RunStore(folder)
    summaries, predictions = summarize(store.run(), store.records()), read_predictions(folder)
    fields = varying_fields([*store.run().cells.values()])
    bounds = step_bounds(
        predictions,
        summaries,
        peaks=lambda machine: read_peaks(slug(machine)),
        links=lambda machine: read_links(slug(machine)),
    )
    entries = [
        (summary, entry)
        for summary in summaries
        if summary.cell_id in predictions
        for entry in reconcile(predictions[summary.cell_id], summary, bounds.by_cell.get(summary.cell_id))
    ]
    if format_ is Format.json:
        rows = [{"cell_id": summary.cell_id, **asdict(entry), "error": entry.error} for summary, entry in entries]
        print(json.dumps(rows, indent=2))
        return
    for summary, entry in entries:
        predicted, measured = (quantity(value, entry.unit, 4) for value in (entry.predicted, entry.measured))
        error = "" if entry.error is None else f", error {entry.error:+.2%}"
        print(f"{label(summary.cell, fields)}: {entry.quantity} {entry.verdict}")
        print(f"  predicted {predicted}, measured {measured}{error}; {entry.residual}")
    counts = [f"{name} {sum(entry.verdict == name for _, entry in entries)}" for name in _verdicts(entries)]
    if bounds.note:
        print(f"\n{bounds.note}")
    print(f"\n{len(entries)} predictions: {', '.join(counts)}\n{path}; `benchbox report {folder}` shows them")


def _verdicts(entries: "Sequence[tuple[Any, Any]]") -> list[str]:
    return sorted({entry.verdict for _, entry in entries})
