"""The content of a site, without markup."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from benchbox.analysis.baseline import slug
from benchbox.analysis.figures import without_search
from benchbox.analysis.inference import ALPHA
from benchbox.analysis.peak_changes import BY_CHANCE
from benchbox.analysis.quantities import UNKNOWN, counted, quantity
from benchbox.analysis.summary import label, varying_fields
from benchbox.analysis.trends import NEAREST, ChangePoint, Trend, TrendPoint, mark_changes, order_points
from benchbox.registry.metrics import metric_by_name
from benchbox.report.comparison.view import ratio_text
from benchbox.store.noise import read_noise

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from benchbox.registry.metrics import Metric
    from benchbox.report.site.sources import SiteRun, SiteSources

METRICS = ("global_samples_per_s", "peak_allocated_bytes")
POINT_COLUMNS = ("run", "commit", "date", "value", "launches", "low", "high", "torch")
CHANGE_COLUMNS = ("cell", "metric", "before", "after", "after / before", "verdict", "they also differ in")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPage:
    """Trends of a matrix on one machine. `file` is the name of its page."""

    matrix: str
    machine: str
    file: str
    trends: tuple[Trend, ...]
    runs: tuple[SiteRun, ...]

    @property
    def metrics(self) -> list[Metric]:
        return list({trend.metric.name: trend.metric for trend in self.trends}.values())

    @property
    def cells(self) -> dict[str, list[Trend]]:
        """Trends by the label of their cell, in the order of the runs."""
        cells: dict[str, list[Trend]] = defaultdict(list)
        for trend in self.trends:
            cells[trend.cell].append(trend)
        return dict(cells)

    @property
    def measurements(self) -> set[str]:
        """Names of the runs that trends have points of."""
        return {point.run for trend in self.trends for point in trend.points}

    @property
    def changes(self) -> list[tuple[Trend, ChangePoint]]:
        return [(trend, change) for trend in self.trends for change in trend.changes]

    @property
    def summary(self) -> str:
        verdicts = Counter(verdict_of_change(change) for _, change in self.changes)
        compared = sum(len(trend.points) > 1 for trend in self.trends)
        texts = {"worse": "for the worse", "better": "for the better", "drift": "drift of the machine within a commit"}
        changes = ", ".join(f"{verdicts[verdict]} {text}" for verdict, text in texts.items() if verdicts[verdict]) or "none"
        runs = counted(len(self.measurements), "run", "runs and baselines")
        return (
            f"{runs} of {len(self.cells)} cells on {self.machine}; {compared} of {len(self.trends)} trends have two runs "
            f"or more. Changes: {changes}."
        )

    @property
    def dates(self) -> str:
        """First and last day on which it was measured."""
        days = sorted({point.started_at[:10] for trend in self.trends for point in trend.points if point.started_at})
        return UNKNOWN if not days else days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def build_pages(
    sources: SiteSources, commits: Mapping[str, int], *, metrics: Sequence[str] = METRICS, relevant: float
) -> list[MatrixPage]:
    """Return a page for every matrix and machine, by name.

    Args:
        commits: position of every commit.
        relevant: a smaller relative change is none.

    Raises:
        ConfigurationError: there is no such metric.
    """
    named = [metric_by_name(name) for name in metrics]
    groups: dict[tuple[str, str], list[SiteRun]] = defaultdict(list)
    for run in sources.runs:
        groups[run.figures.matrix, slug(str(run.figures.environment.get("machine") or "unknown machine"))].append(run)
    files = _file_names(groups)
    pages = []
    for (matrix, machine), runs in sorted(groups.items()):
        trends = _trends(runs, named, commits)
        pages.append(
            MatrixPage(
                matrix=matrix,
                machine=machine,
                file=files[matrix, machine],
                trends=tuple(mark_changes(trends, relevant=relevant, noise=read_noise(machine).get(matrix))),
                runs=tuple(runs),
            )
        )
    return pages


def _file_names(groups: Collection[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return names of pages by matrix and machine: matrices whose names differ in punctuation only have numbers."""
    matrices = Counter(matrix for matrix, _ in groups)
    names: dict[tuple[str, str], str] = {}
    for matrix, machine in sorted(groups):
        stem = slug(matrix if matrices[matrix] == 1 else f"{matrix}-{machine}")
        numbered = (f"{stem}{f'-{number}' if number > 1 else ''}.html" for number in count(1))
        names[matrix, machine] = next(name for name in numbered if name not in ("index.html", *names.values()))
    return names


def _trends(runs: Sequence[SiteRun], metrics: Sequence[Metric], commits: Mapping[str, int]) -> list[Trend]:
    labels = _labels(runs)
    trends = []
    for cell_id in labels:
        measurements = _measurements(runs, cell_id)
        for metric in metrics:
            points = [point for run in measurements if (point := _point(run, cell_id, metric)) is not None]
            if points:
                ordered = tuple(order_points(points, commits))
                trends.append(Trend(cell_id=cell_id, cell=labels[cell_id], metric=metric, points=ordered))
    return trends


def _labels(runs: Sequence[SiteRun]) -> dict[str, str]:
    """Return labels of all cells by id, the latest run first: by the fields in which cells of one run differ.

    Cells of earlier runs may differ from them in anything else: where labels would be equal, they have the id.
    """
    cells = {cell_id: figures.cell for run in reversed(runs) for cell_id, figures in run.figures.cells.items()}
    varying = {field for run in runs for field in varying_fields(figures.cell for figures in run.figures.cells.values())}
    fields = dict.fromkeys(field for cell in cells.values() for field in cell if field in varying)
    labels = {cell_id: label(cell, fields) for cell_id, cell in cells.items()}
    counts = Counter(labels.values())
    return {cell_id: text if counts[text] == 1 else f"{text} ({cell_id})" for cell_id, text in labels.items()}


def _measurements(runs: Sequence[SiteRun], cell_id: str) -> list[SiteRun]:
    """Return the runs that measured a cell. One measurement, published several times or also as a baseline, is one.

    Two measurements of a commit never have the same step times. Of equal ones, that with values of launches and a report is
    taken.
    """
    distinct: dict[Any, SiteRun] = {}
    for number, run in enumerate(runs):
        figures = run.figures.cells.get(cell_id)
        if figures is None:
            continue
        step_time = figures.values.get("step_time_s")
        commit = (run.figures.environment.get("git") or {}).get("commit")
        key = number if step_time is None else (commit, step_time.value, step_time.low, step_time.high)
        if key not in distinct or _completeness(run, cell_id) >= _completeness(distinct[key], cell_id):
            distinct[key] = run
    return list(distinct.values())


def _completeness(run: SiteRun, cell_id: str) -> tuple[int, bool]:
    return len(run.figures.cells[cell_id].by_launch.get("step_time_s") or ()), run.report is not None


def _point(run: SiteRun, cell_id: str, metric: Metric) -> TrendPoint | None:
    figures = run.figures.cells.get(cell_id)
    if figures is not None and figures.of_walk:
        figures = without_search(figures)
    spread = None if figures is None else figures.values.get(metric.name)
    if figures is None or spread is None:
        return None
    environment = run.figures.environment_of(cell_id)
    git = environment.get("git") or {}
    launches = figures.by_launch.get(metric.name) or {}
    return TrendPoint(
        run=run.figures.name,
        commit=git.get("commit"),
        dirty=bool(git.get("dirty")),
        started_at=min(run.figures.started_at, default=run.published_at),
        value=spread.value,
        low=spread.low,
        high=spread.high,
        launches=tuple(launches.values()),
        environment=environment,
        steps=run.figures.measure.get("steps"),
    )


def commit_text(point: TrendPoint) -> str:
    """Return the commit in short, with an asterisk if files were changed since."""
    return f"{point.commit[:8]}{'*' if point.dirty else ''}" if point.commit else UNKNOWN


def point_texts(point: TrendPoint, metric: Metric) -> tuple[str, ...]:
    """Return a point as texts, one for each of `POINT_COLUMNS`."""
    value, low, high = (quantity(number, metric.unit, digits=4) for number in (point.value, point.low, point.high))
    launches = str(len(point.launches)) if point.launches else UNKNOWN
    torch = str(point.environment.get("torch") or UNKNOWN)
    return point.run, commit_text(point), point.started_at[:10] or UNKNOWN, value, launches, low, high, torch


def verdict_of_change(change: ChangePoint) -> str:
    """Return `worse` or `better`, or `drift` where the machine changed and not the code."""
    return "drift" if change.is_drift else "worse" if change.is_worse else "better"


def change_texts(trend: Trend, change: ChangePoint) -> tuple[str, ...]:
    """Return a change as texts, one for each of `CHANGE_COLUMNS`."""
    return (
        trend.cell,
        trend.metric.name,
        f"{quantity(change.before.value, trend.metric.unit, digits=4)} at {commit_text(change.before)}",
        f"{quantity(change.after.value, trend.metric.unit, digits=4)} at {commit_text(change.after)}",
        "from 0" if change.ratio is None else ratio_text(change),
        verdict_of_change(change),
        "; ".join(change.differences) or "nothing",
    )


def method_text(relevant: float) -> str:
    """Return how changes were found."""
    return (
        f"A change is larger than {100 * relevant:.3g}%. Binary segmentation (Scott and Knott 1974) proposes where a trend "
        f"splits, and an exact permutation test of up to {NEAREST} launches on either side confirms it at {ALPHA:.0%}, "
        "corrected for the number of positions (Bonferroni) and of proposals in the matrix (Holm). Of a batch of a walk, the "
        "launch that searched is not tested. Peaks and precision are compared by value; chance raises the peak of a launch by "
        f"up to {BY_CHANCE:.0%}, and a smaller change counts if two launches or more show it. A difference between runs of one "
        "commit is drift of the machine, and no smaller change of that trend is marked; drift is not known where no commit has "
        "two runs. Whiskers, low and high are the range over launches; * marks a commit with uncommitted changes."
    )
