"""`benchbox run` on this machine, or as node 0 of several: the missing launches, predictions and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from benchbox.analysis.quantities import counted
from benchbox.cli.auto_launches import run_until_settled
from benchbox.cli.earlier_plan import describe_earlier_tests
from benchbox.cli.nodes import open_launcher, open_node_0
from benchbox.cli.predicting import predict_run
from benchbox.cli.statistics import prepare_statistics
from benchbox.cli.walk_launches import WalkLaunches, find_records
from benchbox.launch.capacity import shared_cores_warning
from benchbox.launch.lock import lock_run_directory
from benchbox.launch.process.signals import handle_stop_signals, stop_on_signals
from benchbox.launch.progress import ConsoleProgress
from benchbox.launch.resume import remove_outdated_launches
from benchbox.launch.runner import RunSummary, run_matrix
from benchbox.report import write_reports
from benchbox.report.rows import say
from benchbox.report.terminal import print_table
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchbox.cli.matrix_run import MatrixRun
    from benchbox.launch.job import Launcher
    from benchbox.launch.nodes.settings import NodeSettings
    from benchbox.launch.resume import Launches


def run_here(
    matrix_run: MatrixRun, *, launcher: str, nodes: NodeSettings | None, may_start: Callable[[], bool], estimate: bool
) -> RunSummary:
    """Run the missing launches, and unless the user stopped them, predict their cells and write the reports.

    Args:
        may_start: whether a further launch may begin.

    Raises:
        ConfigurationError: another command works in the run directory.
    """
    console, folder = Console(highlight=False), matrix_run.folder
    with handle_stop_signals(_interrupt), lock_run_directory(folder):
        with open_node_0(folder, nodes) as node_0:
            walks = matrix_run.open_walks(fresh=matrix_run.fresh)
            walks.predict(console)
            selected = matrix_run.selected
            repeated = find_records(matrix_run.store, selected.cells, selected.walks) if matrix_run.fresh else []
            if not matrix_run.auto and (line := describe_earlier_tests(walks.run)):
                say(console, line)
            if matrix_run.launches or not matrix_run.auto:
                matrix_run.store.write_run(walks.run)
            ranks = max(cell.world_size for cell in (*selected.cells, *selected.walks))
            if warning := shared_cores_warning(ranks // (1 if nodes is None else nodes.count)):
                say(console, f"warning: {warning}")
            _prepare_data(matrix_run, console)
            with stop_on_signals() as stop:
                opened = open_launcher(launcher, nodes, node_0, stop)
                for cell_id, launch in repeated:  # launches can begin: a run that is stopped resumes with what it has
                    matrix_run.store.remove_record(cell_id, launch)
                summary = _RunLaunches(matrix_run, walks, opened, stop, may_start, console).run()
        if not summary.stopped:
            if estimate:
                predict_run(folder, matrix_run.matrix.policy_dirs, lambda cells: console.print(_predicting(cells)))
            report(folder)
    return summary


def _interrupt(_: int) -> NoReturn:
    """End what is no launch, such as a prediction, as Ctrl-C does: its processes end, and the exit code is that of a stop."""
    raise KeyboardInterrupt


def report(folder: Path) -> None:
    """Write the reports of a run directory, and print its table."""
    paths = write_reports(folder)
    print()
    print_table(folder, Console())
    print(f"\nreport: {paths.html}\n{RunStore(folder).chain.describe()}")


def _prepare_data(matrix_run: MatrixRun, console: Console) -> None:
    data = matrix_run.matrix.data
    say(console, data.reading)
    prepare_statistics(data, (cell.seed for cell in (*matrix_run.selected.cells, *matrix_run.selected.walks)), console)


def _predicting(cells: int) -> str:
    return f"predicting memory and communication of {counted(cells, 'cell')}; --no-estimate leaves it out"


class _RunLaunches:
    """The launches of a run: those whose number is known, then those of walks, then those that settle pairs."""

    def __init__(
        self,
        matrix_run: MatrixRun,
        walks: WalkLaunches,
        launcher: Launcher,
        stop: Callable[[], bool],
        may_start: Callable[[], bool],
        console: Console,
    ) -> None:
        self._matrix_run = matrix_run
        self._walks = walks
        self._launcher = launcher
        self._stop = stop
        self._may_start = may_start
        self._console = console
        self._progress = ConsoleProgress(console, lambda cell: matrix_run.label_of(cell.to_dict()))

    def run(self) -> RunSummary:
        matrix_run, launches = self._matrix_run, self._matrix_run.launches
        policy_dirs = matrix_run.matrix.policy_dirs
        if launches and not matrix_run.auto:
            note = remove_outdated_launches(launches, matrix_run.measure, matrix_run.store, policy_dirs)
            if note:
                say(self._console, note)
        summary = self._launch(launches) if launches else RunSummary()
        if matrix_run.matrix.search and not summary.has_ended:
            summary = summary.followed_by(self._walks.launch(self._launch, self._console))
        if matrix_run.auto and not summary.has_ended:
            summary = summary.followed_by(self._settle())
        return summary

    def _launch(self, launches: Launches) -> RunSummary:
        matrix_run = self._matrix_run
        return run_matrix(
            launches,
            measure=matrix_run.measure,
            store=matrix_run.store,
            launcher=self._launcher,
            progress=self._progress,
            policy_dirs=matrix_run.matrix.policy_dirs,
            stop=self._stop,
            may_start=self._may_start,
        )

    def _settle(self) -> RunSummary:
        matrix_run = self._matrix_run
        cells = {cell.cell_id for cell in matrix_run.selected.cells}
        return run_until_settled(
            self._walks.run,
            matrix_run.store,
            selected=self._walks.fastest_batches() if matrix_run.matrix.search else cells,
            launch=self._launch,
            label=matrix_run.label_of,
            console=self._console,
        )
