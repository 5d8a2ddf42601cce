"""`benchbox plan`: the cells and launches of a run, without running it."""

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import OnlyOption, PolicyDirOption, SetOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.cli.predicting import Predictions
    from benchbox.errors import Problem
    from benchbox.plan import Plan
    from benchbox.spec import Matrix
    from benchbox.spec.cell import Cell
    from benchbox.theory.prediction import Estimate


_MAX_LOOKED_UP = 10_000  # cells whose predictions are read from the cache: of more, that takes seconds


def plan(
    matrices: Annotated[
        list[Path], typer.Argument(metavar="MATRIX...", help="Matrix files, or names in matrices/; training files as well.")
    ],
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    only: OnlyOption,
    estimate: Annotated[
        bool | None,
        typer.Option(
            "--estimate/--no-estimate",
            envvar="BENCHBOX_ESTIMATE",
            help="Predict peak memory and communication of every cell.",
            show_default="those that were predicted before",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print the problems of the files only, all of them; nothing if there are none.")
    ] = False,
) -> None:
    """Print the cells of a matrix, and why others are skipped. The run may be for a larger machine than this one.

    Exit code 2 when no cell of a matrix can run.
    """
    from benchbox.cli.capacity import unrunnable_problems
    from benchbox.errors import ConfigurationError
    from benchbox.spec import load_matrix, parse_overrides

    if check:
        _check(matrices, sets, policy_dirs, only)
        return
    unrunnable: list[Problem] = []
    for matrix in matrices:
        planned = _print_matrix(load_matrix(matrix, parse_overrides(sets), policy_dirs), only, estimate=estimate)
        unrunnable += unrunnable_problems(matrix, planned)
    if unrunnable:
        raise ConfigurationError(unrunnable)


def _check(paths: "Sequence[Path]", sets: "Sequence[str]", policy_dirs: "Sequence[Path]", only: "Sequence[str]") -> None:
    """Raise ConfigurationError with the problems of all files."""
    from benchbox.cli.capacity import unrunnable_problems
    from benchbox.errors import ConfigurationError
    from benchbox.plan import join_expressions
    from benchbox.plan import plan as plan_cells
    from benchbox.spec import load_matrix, parse_overrides
    from benchbox.spec.schema import OF_MATRICES
    from benchbox.spec.source import read_source
    from benchbox.spec.train import load_train

    problems: list[Problem] = []
    overrides = parse_overrides(sets)
    of_training = {key: value for key, value in overrides.items() if key.partition(".")[0] not in OF_MATRICES}
    for path in paths:
        try:
            loaded = load_matrix(path, overrides, policy_dirs)
            problems += unrunnable_problems(path, plan_cells(loaded, join_expressions(only)))
            if "steps" in read_source(loaded.path).values:  # a training file, whose sections may contradict one another
                load_train(loaded.path, of_training, policy_dirs)
        except ConfigurationError as error:
            problems += error.problems
    if problems:
        raise ConfigurationError(problems)


def _print_matrix(loaded: "Matrix", only: "Sequence[str]", *, estimate: bool | None) -> "Plan":
    """Print the plan of a matrix, on request with predictions, and what this machine cannot run of it. Return the plan."""
    from benchbox.cli.capacity import skip_beyond_capacity
    from benchbox.plan import join_expressions
    from benchbox.plan import plan as plan_cells

    planned = plan_cells(loaded, join_expressions(only))
    predictions: Predictions | None = None
    largest = None
    if estimate:
        from benchbox.cli.predicting import local_device, predict_cells, predict_largest_batches, rank_limit_bytes

        predictions = predict_cells(planned.cells, loaded.policy_dirs, loaded.measure.probed_step, local_device())
        if loaded.search:
            step, limit_bytes = loaded.measure.probed_step, rank_limit_bytes(loaded.measure.memory_limit)
            largest = predict_largest_batches(planned.walks, loaded.policy_dirs, step, limit_bytes, loaded.search.at_most)
    elif estimate is None and len(planned.cells) <= _MAX_LOOKED_UP:
        predictions = _read_predictions(planned.cells, loaded)
    print_plan(loaded, planned, predictions, largest)
    if estimate is None and predictions is None and len(planned.cells) <= _MAX_LOOKED_UP:
        print("no cell was predicted yet: --estimate predicts peak memory and communication")
    refused = skip_beyond_capacity(planned).skipped[len(planned.skipped) :]
    for reason in dict.fromkeys(skip.reason for skip in refused):
        _print_wrapped(f"this machine cannot run {sum(skip.reason == reason for skip in refused)} of the cells: {reason}")
    return planned


def _read_predictions(cells: "Sequence[Cell]", matrix: "Matrix") -> "Predictions | None":
    """Return the predictions that the user's cache has, or None without any."""
    from benchbox.cli.predicting import local_device
    from benchbox.cli.prediction_cache import PredictionCache

    cache = PredictionCache(matrix.policy_dirs, matrix.measure.probed_step, local_device())
    predictions = {cell.cell_id: cache.read(cell) for cell in cells}
    if not any(predictions.values()):
        return None
    return {cell_id: prediction or "--estimate predicts it" for cell_id, prediction in predictions.items()}


def print_plan(
    matrix: "Matrix",
    planned: "Plan",
    predictions: "Predictions | None" = None,
    largest: "Mapping[str, int | str] | None" = None,
) -> None:
    """Print a plan: as a table on a terminal, as aligned plain lines elsewhere. With predictions, it has columns of them.

    Args:
        largest: the predicted largest batch of the walk that a cell begins, by cell id, or why there is none.
    """
    from benchbox.analysis.quantities import counted
    from benchbox.spec.data_checks import camera_slots
    from benchbox.spec.fields import POINT_TYPES
    from benchbox.spec.matrix import describe

    all_cells = [*planned.cells, *(skip.cell for skip in planned.skipped)]
    values = all_cells[0].to_dict()
    point = [field for field in values if field in POINT_TYPES]
    fields = [field for field in point if len({getattr(cell, field) for cell in all_cells}) > 1]
    constant = {field: values[field] for field in point if field not in fields}
    data = {"data": matrix.data.label, "tokenizer": matrix.data.tokenizer}
    first_batch = f", batch={constant.pop('batch')} and up" if planned.walks and "batch" in constant else ""
    _print_wrapped(f"{matrix.name}: in every cell {describe({**constant, **data})}{first_batch}")
    if planned.cells:
        print()
        _print_table(planned.cells, fields, predictions, largest)
    cameras, cams = camera_slots(matrix.data), max((cell.cams for cell in planned.cells), default=0)
    if cameras is not None and cams > cameras:
        print()
        _print_wrapped(f"the data have {counted(cameras, 'camera')}: with cams={cams} the others are black and masked")
    if planned.skipped:
        print("\nskipped")
        for skip in planned.skipped:
            _print_wrapped(
                f"  {describe({field: getattr(skip.cell, field) for field in fields or ['backend']})}: {skip.reason}"
            )
    launches, steps = matrix.measure.launches, matrix.measure.steps
    cells = len(planned.cells) - len(planned.walks)
    if matrix.search:
        most = f", at most {matrix.search.at_most}" if matrix.search.at_most else ""
        walks = counted(len(planned.walks), "walk")
        print()
        _print_wrapped(
            f"{walks} to the largest batch that fits, each from batch {matrix.search.start} on{most}: "
            "`run` goes on with the batch that theory predicts (--estimate shows it here), and launches decide which follow"
        )
    if cells or not matrix.search:
        factors = f"{counted(cells, 'cell')} x {counted(launches, 'launch', 'launches')}"
        print(f"\n{factors} = {counted(cells * launches, 'launch', 'launches')}", end="")
        print(f" of {matrix.measure.warmup_steps} + {steps} steps; {len(planned.skipped)} skipped")


def _print_wrapped(text: str, indent: int = 4) -> None:
    print(textwrap.fill(text, 80, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False))


def _print_table(
    cells: "Sequence[Cell]",
    fields: "Sequence[str]",
    predictions: "Predictions | None",
    largest: "Mapping[str, int | str] | None",
) -> None:
    """Print aligned columns, or one wrapped line per cell on a terminal too narrow for the columns."""
    from benchbox.spec.matrix import describe, to_yaml_word

    rows = [["cell", *fields], *([cell.cell_id, *(to_yaml_word(getattr(cell, field)) for field in fields)] for cell in cells)]
    if predictions is not None:
        rows[0] += ["predicted peak", "in", "communication"]
        for row, cell in zip(rows[1:], cells, strict=True):
            row += _prediction_texts(predictions[cell.cell_id])
    if largest is not None:
        rows[0].append("predicted largest batch")
        for row, cell in zip(rows[1:], cells, strict=True):
            row.append(str(largest.get(cell.cell_id, "-")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if sys.stdout.isatty() and max(map(len, lines)) > shutil.get_terminal_size().columns:
        for cell, row in zip(cells, rows[1:], strict=True):
            columns = list(zip(rows[0], row, strict=True))
            predicted = [f"{name} {text}" for name, text in columns[1 + len(fields) :]]
            words = [describe({field: getattr(cell, field) for field in fields}), *predicted]
            _print_wrapped(f"{cell.cell_id}  {', '.join(words)}", indent=14)
        return
    typer.secho(lines[0], bold=True)  # plain where there is no terminal
    print("\n".join(lines[1:]))


def _prediction_texts(entry: "Estimate | str") -> list[str]:
    from benchbox.analysis.quantities import quantity

    if isinstance(entry, str):
        return ["-", "-", entry]
    traffic = sum(collective["bytes"] for collective in entry.collectives.values())
    return [quantity(entry.peak_bytes, "bytes"), entry.moment, quantity(traffic, "bytes")]
