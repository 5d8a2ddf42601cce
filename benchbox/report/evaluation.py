"""Report on evaluations in closed loop: success rates with their intervals, and stills."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchbox.errors import RecordError
from benchbox.report.figures.curves import curve_drawing
from benchbox.report.html import page_figures, render_template
from benchbox.report.markdown import escape
from benchbox.store.files import read_json, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.report.figures.curves import Curve
    from benchbox.report.figures.drawing import Drawing

RECORD = "evaluation.json"
_METHOD = (
    "An episode is solved if the environment says so at any action. The interval is Wilson's at 95%; it covers the choice of "
    "seeds, and not that of the training's seed. A policy acts from the newest frame, and the first actions of its chunk are "
    "executed before it acts again."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilmedEpisode:
    """Stills of an episode, as URIs of their data, and the responses that the policy generated, each with its first step."""

    title: str
    responses: tuple[tuple[int, str], ...]
    stills: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One evaluation. `low` and `high` are the ends of the interval of the success rate."""

    name: str
    training: str
    env: str
    solved: int
    episodes: int
    rate: float
    low: float
    high: float
    mean_steps: str
    execution: str
    filmed: tuple[FilmedEpisode, ...]

    @property
    def interval(self) -> str:
        return f"{self.low:.0%} to {self.high:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Everything that the page shows. `paragraphs` say what was found; figures show the trainings."""

    title: str
    rows: tuple[EvaluationRow, ...]
    paragraphs: tuple[str, ...] = ()
    figures: tuple[Drawing, ...] = ()
    method: str = _METHOD


def build_evaluation_report(folders: Sequence[Path]) -> EvaluationReport:
    """Build the report of evaluations, each a folder that `benchbox eval` wrote.

    Raises:
        RecordError: a folder has no valid record.
    """
    rows = tuple(_row(folder, read_json(folder / RECORD)) for folder in folders)
    envs = dict.fromkeys(row.env for row in rows)
    return EvaluationReport(title=f"Closed loop: {', '.join(envs)}", rows=rows)


def training_drawing(key: str, title: str, description: str, curves: Sequence[Curve]) -> Drawing:
    """Return the figure of curves of trainings over a common axis of steps, from zero up to the highest value.

    Raises:
        ValueError: there is no positive value, or no step after 0.
    """
    steps = max((step for curve in curves for step in curve.steps), default=0)
    highest = max((value for curve in curves for value in curve.values if value is not None), default=0)
    if steps <= 0 or highest <= 0:
        raise ValueError(f"{title}: nothing to draw")
    return curve_drawing(curves, key=key, title=title, description=description, section="trainings")


def write_evaluation(folders: Sequence[Path], out: Path) -> Path:
    """Write `evaluation.html` and `evaluation.md` into `out`, and return the path of the page."""
    return write_evaluation_report(build_evaluation_report(folders), out, "evaluation")


def write_evaluation_report(report: EvaluationReport, out: Path, name: str) -> Path:
    """Write a report as `<name>.html` and `<name>.md` into `out`, and return the path of the page."""
    page = out / f"{name}.html"
    write_text(page, render_template("evaluation.html.j2", report=report, figures=page_figures(report.figures)))
    write_text(out / f"{name}.md", render_markdown(report))
    return page


def render_markdown(report: EvaluationReport) -> str:
    """Render the report as Markdown, without figures and stills."""
    lines = [f"# {escape(report.title)}", ""]
    for paragraph in report.paragraphs:
        lines += [escape(paragraph), ""]
    lines.append("| checkpoint | training | environment | solved | rate | 95% interval |")
    lines.append("|---|---|---|---:|---:|---|")
    for row in report.rows:
        texts = map(escape, (row.name, row.training, row.env))
        lines.append(f"| {' | '.join(texts)} | {row.solved} of {row.episodes} | {row.rate:.0%} | {row.interval} |")
    return "\n".join([*lines, "", report.method, ""])


def _row(folder: Path, record: dict[str, Any]) -> EvaluationRow:
    if error := record.get("error"):
        raise RecordError(f"{folder / RECORD}: the evaluation did not end: {error['message']}; evaluate again")
    try:
        cell, rate, episodes = record["checkpoint"]["cell"], record["success_rate"], record["episodes"]
        solved_steps = [episode["steps"] for episode in episodes if episode["solved"]]
        return EvaluationRow(
            name=record["checkpoint"]["name"] + _kind(record),
            training=f"{cell['policy']} {cell['size']}, {cell['recipe']}, lr {cell['optim']['lr']:g}, seed {cell['seed']}",
            env=record["env"],
            solved=rate["solved"],
            episodes=rate["episodes"],
            rate=rate["rate"],
            low=rate["low"],
            high=rate["high"],
            mean_steps=f"{sum(solved_steps) / len(solved_steps):.0f}" if solved_steps else "none solved",
            execution=f"{record['execute']} of {record['horizon']} actions, at most {record['max_steps']}",
            filmed=tuple(_filmed(folder, episode) for episode in episodes if episode["stills"]),
        )
    except (KeyError, TypeError) as error:
        raise RecordError(f"{folder / RECORD}: not what benchbox eval writes ({type(error).__name__}: {error})") from None


def _kind(record: dict[str, Any]) -> str:
    """Return which weights acted, unless they are those that were trained, in float32. Older records do not know."""
    averages = ", averages" if record.get("weights") == "averages" else ""
    return averages + (f", {record['dtype']}" if record.get("dtype", "float32") != "float32" else "")


def _filmed(folder: Path, episode: dict[str, Any]) -> FilmedEpisode:
    outcome = "solved" if episode["solved"] else "not solved"
    images = [(folder / still).read_bytes() for still in episode["stills"]]
    return FilmedEpisode(
        title=f"seed {episode['seed']}: {outcome} after {episode['steps']} actions",
        responses=tuple((response["step"], response["text"]) for response in episode.get("responses", ())),  # of older records
        stills=tuple(f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images),
    )
