"""`benchbox estimate`: memory, communication and time by theory, before anything runs or beside what was measured."""

import json
from collections import Counter
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchbox.cli.links import read_measured_link
from benchbox.cli.machine_checks import rank_variables
from benchbox.cli.options import Format, FormatOption, OnlyOption, PolicyDirOption, SetOption
from benchbox.theory.links import MEASURED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.cli.estimate_output import Hardware
    from benchbox.launch.simulated_ranks import Simulation
    from benchbox.spec.cell import Cell
    from benchbox.theory.links import MeasuredLink


class DeviceKind(StrEnum):
    """Values of `--device`."""

    cpu = "cpu"
    cuda = "cuda"


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
    """Predict memory and communication of every cell.

    The memory is split by component, and the time of a step is bounded from below and above. No rank is started and no device
    is needed, for any number of ranks. Of a run directory, the predictions are written into it as predictions.json, printed
    beside the measurements, and part of its report from then on.

    Of a walk to the largest batch that fits, the peak is that of its first batch, and the largest batch that theory says fits
    stands below it.

    Exit code 1 when a prediction failed of an error that nobody foresaw, and 0 when all others say why there is none.

    Where `benchbox doctor --links` has measured the links of this machine, they bound communication unless --link names others.
    """
    from benchbox.errors import ConfigurationError

    if target.is_dir():
        if sets or only or simulate or device or accelerator or link:
            options = "--set, --only, --simulate, --device, --accelerator and --link"
            raise ConfigurationError(f"{target} is a run directory: {options} are for a matrix")
        _estimate_run(target, policy_dirs, format_)
        return
    from benchbox.cli.estimate_output import PlanEstimates
    from benchbox.cli.predicting import check_predicted, local_device, predict_cells, predict_largest_batches, rank_limit_bytes

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
    measure, is_here = loaded.measure, accelerator is None and kind == local_device()
    limit_bytes = rank_limit_bytes(measure.memory_limit) if is_here else measure.memory_limit
    largest: Mapping[str, int | str] = {}
    if loaded.search:
        at_most = loaded.search.at_most
        largest = predict_largest_batches(planned.walks, loaded.policy_dirs, measure.probed_step, limit_bytes, at_most, kind)
    estimates = PlanEstimates(
        planned=planned,
        predictions=predictions,
        largest=largest,
        limit_bytes=limit_bytes,
        simulations=_simulate(cells, loaded.policy_dirs) if simulate else {},
        hardware=hardware,
        measured=measured,
    )
    if format_ is Format.json:
        print(json.dumps(estimates.to_json(), indent=2))
    else:
        estimates.print_text()
    check_predicted([*predictions.values(), *largest.values()])


def _simulate(cells: "Sequence[Cell]", policy_dirs: "Sequence[Path]") -> "Mapping[str, Simulation | str]":
    """Return the simulation of each cell, or why there is none."""
    from benchbox.errors import UnsupportedError
    from benchbox.launch.simulated_ranks import simulate_cells

    simulations = simulate_cells(cells, policy_dirs, environment=rank_variables())
    return {key: str(entry) if isinstance(entry, UnsupportedError) else entry for key, entry in simulations.items()}


def _hardware(accelerator: str, link: "str | MeasuredLink | None") -> "Hardware":
    from benchbox.errors import ConfigurationError, Problem
    from benchbox.registry.names import did_you_mean
    from benchbox.theory.links import DEVICES, LINKS

    for option, name, known in (("--accelerator", accelerator, DEVICES), ("--link", link, LINKS)):
        if isinstance(name, str) and name not in known:
            raise ConfigurationError(Problem(option, f"unknown name {name!r}", did_you_mean(name, known)))
    return DEVICES[accelerator], LINKS[link] if isinstance(link, str) else link


def _estimate_run(folder: Path, policy_dirs: "Sequence[Path]", format_: Format) -> None:
    from benchbox.analysis.baseline import slug
    from benchbox.analysis.quantities import counted, quantity
    from benchbox.analysis.reconciliation import reconcile
    from benchbox.analysis.step_bounds import step_bounds
    from benchbox.analysis.summary import label, summarize, varying_fields
    from benchbox.cli.measured_cell import check_policies
    from benchbox.cli.predicting import check_predicted, predict_run
    from benchbox.store.links import read_links
    from benchbox.store.peaks import read_peaks
    from benchbox.store.predictions import FILE, read_predictions
    from benchbox.store.run import RunStore

    store = RunStore(folder)
    check_policies(folder, (cell["policy"] for cell in store.run().cells.values()), policy_dirs)
    outcomes = predict_run(folder, policy_dirs)
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
        check_predicted(outcomes.values())
        return
    for summary, entry in entries:
        predicted, measured = (quantity(value, entry.unit, 4) for value in (entry.predicted, entry.measured))
        error = "" if entry.error is None else f", error {entry.error:+.2%}"
        print(f"{label(summary.cell, fields)}: {entry.quantity} {entry.verdict}")
        print(f"  predicted {predicted}, measured {measured}{error}; {entry.residual}")
    for reason, count in Counter(entry for entry in outcomes.values() if isinstance(entry, str)).items():
        print(f"no prediction of {counted(count, 'cell')}: {reason}")
    counts = [f"{verdict} {count}" for verdict, count in sorted(Counter(entry.verdict for _, entry in entries).items())]
    if bounds.note:
        print(f"\n{bounds.note}")
    print(f"\n{': '.join([counted(len(entries), 'prediction'), *filter(None, [', '.join(counts)])])}")
    print(f"{folder / FILE}; `benchbox report {folder}` shows them")
    check_predicted(outcomes.values())
