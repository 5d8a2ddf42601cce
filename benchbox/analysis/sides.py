"""The two sides of a comparison: a run directory, a baseline file, or either in a commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.analysis.figures import figures_of_baseline, figures_of_run
from benchbox.analysis.noise import noise_of_matrix
from benchbox.errors import ConfigurationError, RecordError
from benchbox.spec.source import read_source
from benchbox.store.baseline import read_baseline
from benchbox.store.noise import read_noise
from benchbox.store.revisions import extract, is_revision
from benchbox.store.run import RunStore

if TYPE_CHECKING:
    from benchbox.analysis.figures import RunFigures
    from benchbox.store.noise import Noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Figures of a side, and where the axes of its matrix are written, if that file is here."""

    figures: RunFigures
    matrix_file: str | None
    axes_line: int | None


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


def noise_of_side(side: Side) -> Noise | None:
    """Return the noise that was measured on the machine of a side, on its matrix if there is one."""
    machine = side.figures.environment.get("machine")
    return noise_of_matrix(read_noise(slug(str(machine))), side.figures.matrix) if machine else None


def _read(name: str, path: Path) -> Side:
    if path.suffix == ".json":
        if not path.is_file():
            raise RecordError(f"{name}: no such baseline")
        return Side(figures=figures_of_baseline(name, read_baseline(path)), matrix_file=None, axes_line=None)
    store = RunStore(path)
    run = store.run()
    matrix_file = run.matrix_file if Path(run.matrix_file).is_file() else None
    return Side(
        figures=figures_of_run(name, run, list(store.records())),
        matrix_file=matrix_file,
        axes_line=None if matrix_file is None else _axes_line(Path(matrix_file)),
    )


def _axes_line(matrix: Path) -> int | None:
    """Return the line of `axes` in a matrix file; None if it is not a matrix any more."""
    try:
        position = read_source(matrix).where(("axes",), key=True)
    except ConfigurationError:
        return None
    line = position.rsplit(":", 2)[-2]
    return int(line) if line.isdigit() else None
