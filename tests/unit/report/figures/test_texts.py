"""Texts of figures are neither cut off at the edge nor drawn upon another panel or text."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from benchbox.report.figures.drawing import Drawing
from benchbox.report.figures.pareto import Point, draw_panels
from benchbox.report.view import build_report
from benchbox.report.write import read_report
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, example_record, example_run
from tests.support.figure_texts import misplaced_texts

REPORTS = Path(__file__).parents[4] / "reports"


def pareto(names: int, panels: int, name: str) -> Drawing:
    """Return the figure of tasks with as many set-ups at the frontier, and two in the last one."""

    def points(number: int) -> list[Point]:
        return [Point(1e6 * (1 + index), 10.0 + index, "zero2", name.format(index), is_right=True) for index in range(number)]

    tasks = {f"policy=p{panel}": points(names if panel < panels - 1 or panels == 1 else 2) for panel in range(panels)}
    return Drawing(key="pareto", title="", description="", draw=partial(draw_panels, tasks, ["zero2"]))


@pytest.mark.parametrize("names", [2, 6, 10])
@pytest.mark.parametrize("panels", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "name", ["batch={} attention=sdpa", "batch={0} attention=sdpa checkpointing=yes recipe=bf16_stochastic " * 2]
)
def test_all_names_of_a_frontier_have_room_below_their_panel(names, panels, name, monkeypatch):
    assert misplaced_texts(pareto(names, panels, name), monkeypatch) == []


@pytest.mark.parametrize("names", [2, 10])
def test_panels_are_as_high_with_many_names_as_with_few(names):
    from benchbox.report.figures.drawing import PRINT

    figure = pareto(names, 3, "batch={}").draw(PRINT)
    figure.draw_without_rendering()
    heights = [panel.get_window_extent().height / figure.dpi for panel in figure.axes if panel.axison]
    assert min(heights) > 2.3
    assert max(heights) - min(heights) < 0.1


@pytest.mark.parametrize("folder", ["fsdp_vs_zero2", "repeated/4", "precision_ab", "compile"])
def test_texts_of_the_figures_of_a_published_run_are_complete_and_apart(folder, monkeypatch):
    store = RunStore(REPORTS / folder)
    drawings = read_report(store, store.records()).figures
    assert "pareto" in {drawing.key for drawing in drawings}
    assert {drawing.key: problems for drawing in drawings if (problems := misplaced_texts(drawing, monkeypatch))} == {}


def test_figures_of_cells_that_are_told_apart_by_long_paths_are_complete(monkeypatch):
    paths = [f"/home/someone/checkpoints/{'x' * 200}/{name}/model.safetensors" for name in ("first", "second")]
    cells = [replace(CELL, weights=path) for path in paths]
    measure = replace(MEASURE, steps=20, launches=3)
    records = [
        example_record(cell, launch) | {"loss": [1.0] * 21, "grad_norm": [1.0] * 21} for cell in cells for launch in (1, 2, 3)
    ]
    drawings = build_report(example_run(cells, measure=asdict(measure)), records).figures
    assert {"launches", "equivalence-0-loss"} <= {drawing.key for drawing in drawings}
    assert {drawing.key: problems for drawing in drawings if (problems := misplaced_texts(drawing, monkeypatch))} == {}
    for text, drawing in ((path[-20:], drawing) for path in paths for drawing in drawings if drawing.key == "launches"):
        assert text in drawing.svg()
