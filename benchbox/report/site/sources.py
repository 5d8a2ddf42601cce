"""Reading the runs and baselines of a site, as they are in the working tree and in earlier commits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.analysis.sides import open_side
from benchbox.errors import RecordError
from benchbox.store.benchmarks import Benchmarks
from benchbox.store.revisions import is_revision, is_unchanged, revisions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.analysis.figures import RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRun:
    """Figures of a run or a baseline, the path of its report relative to the site, and when it was published."""

    figures: RunFigures
    report: str | None
    published_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSources:
    """Runs that have figures, and the sources without any: their name and the reason."""

    runs: tuple[SiteRun, ...]
    left_out: tuple[tuple[str, str], ...]


def read_sources(names: Sequence[str], out: Path, *, history: bool) -> SiteSources:
    """Read runs, published runs and baselines by their paths or as `REV:PATH`.

    Args:
        names: as the user names them.
        out: folder of the site.
        history: whether to read also their versions in earlier commits. Those that cannot be read are left out.

    Raises:
        RecordError: a source that was named cannot be read.
    """
    runs, left_out = [], []
    for name, published_at, is_named in _versions(names, history=history):
        try:
            side = open_side(name)
        except RecordError as error:
            if is_named:
                raise
            left_out.append((name, str(error).splitlines()[0]))
            continue
        figures = side.figures
        if isinstance(figures, Benchmarks):
            left_out.append((name, "benchmarks of tests have no cells: benchbox compare reads them"))
        elif figures.mixed:
            left_out.append((name, f"its launches differ in {', '.join(figures.mixed)}"))
        elif not any(value is not None for cell in figures.cells.values() for value in cell.values.values()):
            left_out.append((name, "no launch in it has figures"))
        else:
            runs.append(SiteRun(figures=figures, report=_report(name, out), published_at=published_at))
    return SiteSources(runs=tuple(runs), left_out=tuple(left_out))


def _versions(names: Sequence[str], *, history: bool) -> Iterator[tuple[str, str, bool]]:
    """Yield (name, time of publication, whether the user named it), versions of earlier commits before that of the tree."""
    for name in names:
        if is_revision(name) and not Path(name).exists():
            yield name, "", True
            continue
        versions = revisions_of(name) if history else []
        yield from ((version, time, False) for version, time in versions)
        if not versions or not is_unchanged(versions[-1][0]):
            yield name, "", True


def _report(name: str, out: Path) -> str | None:
    """Return the path of the report of a run relative to the site, if it is in the working tree and of this version."""
    path = Path(name)
    if not path.exists():
        if not is_unchanged(name):
            return None
        path = Path(name.partition(":")[2])
    reports = (path / name for name in ("report.html", "report.md"))
    return next((Path(os.path.relpath(report, out)).as_posix() for report in reports if report.is_file()), None)
