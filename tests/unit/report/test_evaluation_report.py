"""Tests of reports on several evaluations."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import RecordError
from benchbox.report.evaluation import build_evaluation_report, training_drawing, write_evaluation, write_evaluation_report
from benchbox.report.figures.curves import Curve
from tests.support.figure_svg import curve_points, texts_of

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
    figure = training_drawing("loss", "Loss by step", "Means of 50 steps.", [Curve("bf16_pure", [0, 100], [2.0, 1.0])])
    report = replace(build_evaluation_report(folders), paragraphs=("Masters <matter>.",), figures=(figure,))
    page = write_evaluation_report(report, tmp_path, "report")
    html, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    assert "Masters &lt;matter&gt;." in html
    assert "bf16_pure ends at 1." in html
    assert figure.svg() in html
    assert re.findall(r'<td class="number">(\d+%)</td>', html) == ["75%", "0%"]
    assert "bf16\\_master, lr 0.0001, seed 1 | metaworld/reach-v3 | 3 of 4 | 75% |" in markdown
    assert "bf16\\_pure, lr 0.0001, seed 1 | metaworld/reach-v3 | 0 of 4 | 0% |" in markdown
    assert "Masters \\<matter\\>." in markdown


def test_curves_share_an_axis_of_steps_and_begin_at_zero() -> None:
    curves = [Curve("short", [0, 50], [4.0, 2.0]), Curve("long", [0, 100], [0.0, 1.0])]
    svg = training_drawing("loss", "Loss", "Of both.", curves).svg()
    (short,), (long,) = curve_points(svg, "s0"), curve_points(svg, "s1")
    assert short[0][0] == long[0][0]
    assert short[1][0] - short[0][0] == pytest.approx((long[1][0] - long[0][0]) / 2, abs=0.05)
    bottom, unit = long[0][1], long[0][1] - long[1][1]
    assert [(bottom - y) / unit for _, y in short] == pytest.approx([4.0, 2.0], abs=0.01)
    assert {"short", "long", "0", "100", "step", "Loss"} <= set(texts_of(svg))


def test_curves_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        training_drawing("loss", "Loss", "Of none.", [Curve("a", [0], [0.0])])


def test_the_page_of_an_evaluation_has_its_steps_its_execution_and_its_stills(folders: list[Path]) -> None:
    solved, none = folders
    record = json.loads((solved / "evaluation.json").read_text())
    record["episodes"][0] |= {"stills": ["a.png", "b.png"], "steps": 19}
    record["episodes"][3]["stills"] = ["b.png"]
    (solved / "evaluation.json").write_text(json.dumps(record))
    for name in ("a", "b"):
        (solved / f"{name}.png").write_bytes(name.encode())
    first, second = build_evaluation_report([solved, none]).rows
    assert (first.mean_steps, second.mean_steps) == ("12", "none solved")
    assert (first.execution, first.interval) == ("5 of 10 actions, at most 60", "0% to 100%")
    a, b = (f"data:image/png;base64,{base64.b64encode(name.encode()).decode()}" for name in ("a", "b"))
    assert [(episode.title, episode.stills) for episode in first.filmed] == [
        ("seed 0: solved after 19 actions", (a, b)),
        ("seed 3: not solved after 9 actions", (b,)),
    ]
    page = write_evaluation([solved], solved)
    assert page == solved / "evaluation.html"
    assert a in page.read_text()


def test_a_record_of_something_else_is_refused_with_its_file(folders: list[Path]) -> None:
    (folders[0] / "evaluation.json").write_text('{"checkpoint": {}}')
    with pytest.raises(RecordError, match=r"bf16_master/evaluation.json: not what benchbox eval writes \(KeyError: 'cell'\)"):
        build_evaluation_report(folders)
