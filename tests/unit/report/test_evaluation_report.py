"""Tests of reports on several evaluations."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchbox.report.evaluation import build_evaluation_report, write_evaluation_report
from benchbox.report.evaluation_charts import TrainingCurve, draw_training_curves

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Evaluations of two recipes: one solved 3 of 4 episodes, the other none."""
    paths = []
    for recipe, solved in (("bf16_master", 3), ("bf16_pure", 0)):
        cell = {"policy": "pi05", "size": "tiny_flow", "recipe": recipe, "seed": 1, "optim": {"lr": 1e-4}}
        record = {
            "checkpoint": {"name": "step-00000007", "steps": 7, "cell": cell},
            "env": "metaworld/reach-v3",
            "execute": 5,
            "horizon": 10,
            "max_steps": 60,
            "success_rate": {"solved": solved, "episodes": 4, "rate": solved / 4, "low": 0.0, "high": 1.0},
            "episodes": [{"seed": k, "solved": k < solved, "steps": 9, "video": None, "stills": []} for k in range(4)],
        }
        path = tmp_path / recipe
        path.mkdir()
        (path / "evaluation.json").write_text(json.dumps(record))
        paths.append(path)
    return paths


def test_a_report_shows_evaluations_side_by_side_with_findings_and_curves(folders: list[Path], tmp_path: Path) -> None:
    curve = TrainingCurve(name="bf16_pure", points=((0, 2.0), (100, 1.0)))
    chart = draw_training_curves("loss", "Loss by step", "Means of 50 steps.", (curve,))
    report = replace(build_evaluation_report(folders), paragraphs=("Masters <matter>.",), charts=(chart,))
    page = write_evaluation_report(report, tmp_path, "report")
    html, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    assert "Masters &lt;matter&gt;." in html
    assert "bf16_pure ends at 1." in html
    assert chart.curves[0].path in html
    assert "bf16\\_master, lr 0.0001, seed 1 | metaworld/reach-v3 | 3 of 4 | 75% |" in markdown
    assert "bf16\\_pure, lr 0.0001, seed 1 | metaworld/reach-v3 | 0 of 4 | 0% |" in markdown
    assert "Masters \\<matter\\>." in markdown


def test_curves_share_an_axis_of_steps_and_begin_at_zero() -> None:
    short = TrainingCurve(name="short", points=((0, 4.0), (50, 2.0)))
    long = TrainingCurve(name="long", points=((0, 0.0), (100, 1.0)))
    chart = draw_training_curves("loss", "Loss", "Of both.", (short, long))
    (_, short_end), (start, _) = (
        [tuple(map(float, point.split())) for point in curve.path[1:].split("L")] for curve in chart.curves
    )
    middle = chart.left + (chart.width - chart.left - 20) / 2
    assert short_end == pytest.approx((middle, (8 + chart.bottom) / 2), abs=0.1)
    assert start == pytest.approx((chart.left, chart.bottom), abs=0.1)


def test_curves_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_training_curves("loss", "Loss", "Of none.", (TrainingCurve(name="a", points=((0, 0.0),)),))
