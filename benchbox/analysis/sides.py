"""The two sides of a comparison: a run directory, a baseline, JSON of pytest-benchmark, or one of them in a commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.analysis.changes import DEFAULT_METRICS, compare_runs
from benchbox.analysis.figures import RunFigures, figures_of_baseline, figures_of_run
from benchbox.analysis.inference import RELEVANT
from benchbox.analysis.noise import why_not_used
from benchbox.analysis.ratios import compare_benchmarks
from benchbox.errors import ConfigurationError, RecordError
from benchbox.spec.source import read_source
from benchbox.store.baseline import read_baseline
from benchbox.store.benchmarks import Benchmarks, is_benchmarks, read_benchmarks
from benchbox.store.noise import read_noise
from benchbox.store.revisions import extract, is_revision
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from benchbox.analysis.changes import RunComparison
    from benchbox.store.noise import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Figures of a side, and where the axes of its matrix are written, if that file is here."""

    name: str  # as the user names it
    figures: RunFigures | Benchmarks
    matrix_file: str | None = None
    axes_line: int | None = None


def open_side(name: str) -> Side:
    """Read a side by its name: the path of a run directory or of a baseline, or `REV:PATH` of one in git.

    Raises:
        RecordError: there is none, or it cannot be read.
    """
    path = Path(name)
    if not path.exists() and is_revision(name):
        with TemporaryDirectory(prefix="benchbox-") as folder:
            return _read(name, extract(name, Path(folder)))
    return _read(name, path)


def compare_sides(
    base: Side,
    head: Side,
    *,
    metric_names: Sequence[str] = (),
    vary: Collection[str] = (),
    relevant: float = RELEVANT,
) -> RunComparison:
    """Return what changed from `base` to `head`: of runs by `compare_runs`, of benchmarks by `compare_benchmarks`.

    Raises:
        ConfigurationError: one side is a run and the other one benchmarks, there is no such metric, or `vary` is given for
            benchmarks.
    """
    before, after = base.figures, head.figures
    if isinstance(before, Benchmarks) and isinstance(after, Benchmarks):
        if vary:
            raise ConfigurationError("--vary is for runs: ratios of benchmarks are compared on one machine only")
        names = (base.name, head.name)
        return compare_benchmarks(before, after, names=names, metrics=metric_names, relevant=relevant)
    if isinstance(before, Benchmarks) or isinstance(after, Benchmarks):
        tests, run = (base, head) if isinstance(before, Benchmarks) else (head, base)
        raise ConfigurationError(
            f"{tests.name} has benchmarks of tests and {run.name} cells of a run: they have nothing in common"
        )
    return compare_runs(
        before,
        after,
        metric_names=tuple(metric_names) or DEFAULT_METRICS,
        vary=vary,
        relevant=relevant,
        noise=_noise_of(after),
    )


def _noise_of(figures: RunFigures) -> Noise | None:
    """Return the noise that was measured of the matrix of a run on its machine with the same set-up, or None."""
    machine = figures.environment.get("machine")
    noise = read_noise(slug(str(machine))).get(figures.matrix) if machine else None
    return None if noise is None or why_not_used(noise, figures.environments, figures.measure) else noise


def _read(name: str, path: Path) -> Side:
    if path.suffix == ".json":
        if not path.is_file():
            raise RecordError(f"{name}: no such baseline")
        if is_benchmarks(path):
            return Side(name=name, figures=read_benchmarks(path))
        return Side(name=name, figures=figures_of_baseline(name, read_baseline(path)))
    store = RunStore(path)
    run = store.run()
    return Side(
        name=name,
        figures=figures_of_run(name, run, list(store.records())),
        matrix_file=run.matrix_file if run.matrix_path else None,
        axes_line=_axes_line(run.matrix_path) if run.matrix_path else None,
    )


def _axes_line(matrix: Path) -> int | None:
    """Return the line of `axes` in a matrix file; None if it is not a matrix any more."""
    try:
        position = read_source(matrix).where(("axes",), key=True)
    except ConfigurationError:
        return None
    line = position.rsplit(":", 2)[-2]
    return int(line) if line.isdigit() else None
