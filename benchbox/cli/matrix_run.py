"""A matrix as `benchbox run` measures it: its plan, the part that the options select, and the launches that are missing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.analysis.summary import label, varying_fields
from benchbox.cli.auto_launches import plan_auto
from benchbox.cli.capacity import check_any_cell, skip_beyond_capacity
from benchbox.cli.earlier_plan import follow_earlier_plan
from benchbox.cli.nodes import check_world_sizes
from benchbox.cli.slurm import check_gpus
from benchbox.cli.walk_launches import WalkLaunches, check_memory_limit, plan_walks
from benchbox.errors import ConfigurationError
from benchbox.launch.resume import PendingLaunches, pending_launches
from benchbox.plan import Plan, join_expressions, plan
from benchbox.plan import launches as launches_of
from benchbox.spec import Matrix, load_matrix, parse_overrides
from benchbox.store.run import Run, RunStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.launch.resume import Launches
    from benchbox.launch.slurm.options import SlurmOptions
    from benchbox.registry.launch_record import CellDict
    from benchbox.spec.cell import MeasureSpec


@dataclass(frozen=True, kw_only=True)
class MatrixRun:
    """A matrix, what the options of `benchbox run` ask of it, and its run directory."""

    matrix: Matrix
    planned: Plan  # all cells
    selected: Plan  # those of --only
    run: Run  # as `run.json` has it, without the walks of earlier commands
    measure: MeasureSpec  # of --launches auto, that of the first launch of each cell of a walk
    store: RunStore
    auto: bool  # launches until all pairs are settled
    fresh: bool  # repeats launches that have records

    @property
    def folder(self) -> Path:
        return self.store.path

    @cached_property
    def launches(self) -> Launches:
        """The selected launches whose number is known before any has run, those of walks left out.

        A run that keeps the looks of an earlier command has those of its look, whatever this one asks for: fewer could not be
        judged, and nothing would judge more.
        """
        if self.auto and not self.matrix.search:
            return []
        planned = self.run.planned_launches()
        most = max(planned[cell.cell_id] for cell in self.selected.cells)
        chosen = launches_of(self.selected, replace(self.matrix.measure, launches=most))
        return [(cell, number) for cell, number in chosen if number <= planned[cell.cell_id]]

    def open_walks(self, *, fresh: bool) -> WalkLaunches:
        """Read the plan of the run directory, and return its walks, to go on with; with `fresh` the selected ones anew."""
        run = self.run
        if self.matrix.search:
            earlier = self.store.run() if (self.folder / "run.json").is_file() else None
            run = plan_walks(run, self.planned.walks, self.matrix.search, earlier, self.selected.walks if fresh else ())
        return WalkLaunches(run, self.store, self.selected.walks, self.measure, self.matrix.policy_dirs, fresh)

    def find_pending(self, *, fresh: bool) -> PendingLaunches:
        """Return the launches that would run now: of walks the next ones, of --launches auto those of the last look."""
        most = self.measure
        if self.auto and self.run.sequential:
            most = replace(most, launches=max(self.run.sequential["looks"]))
        chosen = launches_of(self.selected, most) if self.auto and not self.matrix.search else self.launches
        pending = pending_launches(chosen, self.measure, self.store, self.matrix.policy_dirs, fresh=fresh)
        if not self.matrix.search:
            return pending
        walks = self.open_walks(fresh=fresh)
        return replace(pending, launches=[*pending.launches, *walks.pending()], reused=pending.reused + walks.done())

    def label_of(self, cell: CellDict) -> str:
        """Return the values that distinguish a cell from the others of the matrix."""
        return label(cell, self._label_fields)

    @cached_property
    def _label_fields(self) -> tuple[str, ...]:
        fields = varying_fields(cell.to_dict() for cell in self.planned.cells)
        return tuple(dict.fromkeys([*fields, "batch"] if self.planned.walks else fields))


def open_matrix_run(
    path: Path,
    *,
    out: Path | None,
    sets: Sequence[str],
    policy_dirs: Sequence[Path],
    only: Sequence[str],
    resolution: float | None,
    fresh: bool,
    nodes: int,
    resources: SlurmOptions | None,
    will_launch: bool,
) -> MatrixRun:
    """Load and plan a matrix.

    Args:
        path: the matrix file.
        resolution: of `--launches auto`, a share; None for the launches of the matrix.
        nodes: among which the ranks of a cell are divided, of a run without Slurm.
        resources: of the job that measures it; None on this machine, which then must be able to run the cells.
        will_launch: whether this process launches ranks, so that something must end a search.

    Raises:
        ConfigurationError: the matrix or an option is wrong, or no cell can run.
    """
    overrides = parse_overrides(sets)
    matrix = load_matrix(path, overrides, policy_dirs)
    planned, selected = (plan(matrix, expression) for expression in ("", join_expressions(only)))
    if resources is None:  # a job runs on other machines
        planned, selected = (skip_beyond_capacity(cells, nodes) for cells in (planned, selected))
    check_any_cell(path, selected)
    world_sizes = {cell.world_size for cell in selected.cells}
    check_world_sizes(matrix.path, overrides, world_sizes, resources.nodes if resources else nodes)
    if resources is not None:
        check_gpus(resources, world_sizes)
    if will_launch:
        check_memory_limit(matrix, overrides)
    run, measure = (
        build_run(matrix, planned, matrix_file=str(path), sets=sets, policy_dirs=policy_dirs, out=out),
        matrix.measure,
    )
    if resolution is not None:
        if not matrix.reference or resources:
            raise ConfigurationError("--launches auto tests pairs with the reference of the matrix, and runs without Slurm")
        run, measure = plan_auto(run, planned, resolution), replace(measure, launches=1)
    store = RunStore(out or _default_folder(matrix))
    run = follow_earlier_plan(run, store, measure, matrix.policy_dirs, selected if fresh else None)
    return MatrixRun(
        matrix=matrix,
        planned=planned,
        selected=selected,
        run=run,
        measure=measure,
        store=store,
        auto=resolution is not None,
        fresh=fresh,
    )


def _default_folder(matrix: Matrix) -> Path:
    return Path("runs") / matrix.name


def build_run(
    matrix: Matrix,
    planned: Plan,
    *,
    matrix_file: str,
    sets: Sequence[str],
    policy_dirs: Sequence[Path],
    out: Path | None = None,
) -> Run:
    """Return the plan of a run. `out` is its directory where `--out` named one."""
    options = [("--set", text) for text in sets] + [("--policy-dir", str(folder)) for folder in policy_dirs]
    if out is not None and out.resolve() != _default_folder(matrix).resolve():
        options.append(("--out", str(out)))
    return Run(
        name=matrix.name,
        matrix_file=matrix_file,
        matrix=matrix.values,
        reference=matrix.reference,
        thresholds=[threshold.to_dict() for threshold in matrix.thresholds],
        measure=asdict(matrix.measure),
        cells={cell.cell_id: cell.to_dict() for cell in planned.cells},
        skipped=[{"cell": skip.cell.to_dict(), "reason": skip.reason} for skip in planned.skipped],
        options=[word for option in options for word in option],
    )
