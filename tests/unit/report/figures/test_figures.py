"""Figures of published runs and of cells made by hand: what is drawn, in which colours, with the same bytes every time."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from benchbox.report.figures import launches
from benchbox.report.figures.drawing import PRINT
from benchbox.report.figures.pareto import Point, frontier
from benchbox.report.view import build_report
from benchbox.report.write import write_figures
from benchbox.store.run import RunStore

REPORTS = Path(__file__).parents[4] / "reports"


@cache
def report_of(name):
    store = RunStore(REPORTS / name)
    return build_report(store.run(), list(store.records()))


def figures_of(name):
    return {drawing.key: drawing for drawing in report_of(name).figures}


@cache
def svg_of(name, key):
    """Return a figure of a page, which several tests look at."""
    return figures_of(name)[key].svg()


def changed_figures_of(name, change):
    store = RunStore(REPORTS / name)
    report = build_report(store.run(), [change(record) for record in store.records()])
    return {drawing.key: drawing for drawing in report.figures}


def test_the_frontier_has_the_set_ups_that_none_beats_in_memory_and_throughput():
    points = [
        Point(*values, series="", name="", is_right=True) for values in ((1, 5), (2, 4), (2, 9), (3, 9), (4, 12), (9, 11))
    ]
    assert [(point.bytes, point.samples_per_s) for point in frontier(points)] == [(1, 5), (2, 9), (4, 12)]


def fail_precision(record):
    findings = (f for record in RunStore(REPORTS / "precision_ab").records() for f in record["precision"]["findings"])
    error = next(finding for finding in findings if finding["severity"] == "error")
    return record | {"precision": record["precision"] | {"findings": [error]}}


def diverge(record):
    return record | {"loss": [2 * loss for loss in record["loss"]]}


@pytest.mark.parametrize("spoil", [fail_precision, diverge])
def test_a_set_up_with_wrong_precision_or_of_another_training_is_no_candidate(spoil):
    """It is not on the frontier, which names its points."""
    named = re.search(r">1: (\w+) ", svg_of("backends", "pareto"))[1]
    figures = changed_figures_of("backends", lambda record: spoil(record) if record["cell"]["backend"] == named else record)
    wrong = figures["pareto"].svg()
    assert not re.search(rf">\d: {named} ", wrong)
    assert re.search(r">1: \w+ ", wrong)


def test_a_run_of_walks_has_the_batches_and_launches_of_its_set_ups():
    assert list(figures_of("fsdp_vs_zero2")) == ["pareto", "batches", "launches", "throughput", "memory", "phases", "ranks"]
    svg = svg_of("fsdp_vs_zero2", "batches")
    for text in ("cams=1, attention=eager checkpointing=no", "does not fit", "batch of a rank"):
        assert f">{text}<" in svg


def test_many_cells_are_a_map_in_which_failures_have_a_word_and_a_hatch():
    """Cells of one policy run out of memory, and one cell trains unlike the others of its policy."""
    unlike = {"policy": "pi05", "backend": "zero2", "attention": "sdpa", "checkpointing": False, "cams": 1}

    def fail(record):
        if record["cell"].items() >= unlike.items():
            return diverge(record)
        return record | {"status": "oom"} if record["cell"]["policy"] == "pi0" else record

    figures = changed_figures_of("policies_full", fail)
    assert list(figures) == ["heat_map", "ranks"]
    svg = figures["heat_map"].svg()
    failed = [record for record in RunStore(REPORTS / "policies_full").records() if record["cell"]["policy"] == "pi0"]
    assert svg.count(">oom<") == len(failed) > 10
    assert svg.count(">diverged<") == 1
    assert "url(#heat_map-" in svg, "of the pattern of a hatch"
    assert "<pattern" in svg


def test_in_every_row_of_the_map_a_faster_cell_has_a_stronger_colour():
    (panel,) = figures_of("policies_full")["heat_map"].draw(PRINT).axes
    rows = defaultdict(list)
    for field, text in zip(panel.patches, panel.texts, strict=True):
        rows[text.get_position()[1]].append((float(text.get_text()), field.get_alpha()))
    assert len(rows) > 8
    for row in rows.values():
        strengths = [strength for _, strength in sorted(row)]
        assert strengths[0] < strengths[-1]
        assert strengths == sorted(strengths)


@pytest.mark.parametrize(
    ("run", "key", "heading", "names"),
    [
        ("fsdp_vs_zero2", "launches", "backend · batch · cams · attention · checkpointing", r"\w+ · \d+ · [14] · \w+ · \w+"),
        ("policies_full", "heat_map", "policy · cams · attention · checkpointing", r"pi\w+ · [14] · \w+ · \w+"),
    ],
)
def test_rows_have_short_names_and_their_fields_are_said_once(run, key, heading, names):
    """On a telephone, names that repeat the fields would leave no room for what is measured."""
    texts = re.findall(r">([^<>\n]+)</text>", svg_of(run, key))
    assert f"rows: {heading}" in texts
    assert len([text for text in texts if re.fullmatch(names, text)]) >= 8
    assert not any("=" in text for text in texts)


@pytest.mark.parametrize("key", ["pareto", "batches", "launches", "throughput", "memory", "phases", "ranks"])
def test_a_page_gets_text_as_text_and_no_colour_of_its_own(key):
    svg = svg_of("fsdp_vs_zero2", key)
    assert "<text" in svg
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)
    assert set(re.findall(r"font-family: ([^;\"]+)", svg)) == {"inherit"}
    assert not re.findall(r'(?:xlink:)?href="(?!#)', svg), "nothing is loaded"
    assert svg.startswith("<svg")
    assert f'aria-labelledby="{key}-title {key}-description"' in svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    assert all(name.startswith(f"{key}-") for name in ids)


def test_a_page_scrolls_rather_than_shrinking_labels_and_does_not_magnify_them():
    for key, width in (("throughput", 374.4), ("phases", 748.8)):
        low, high = re.search(r'style="min-width: (\d+)px; max-width: (\d+)px"', svg_of("fsdp_vs_zero2", key)).groups()
        assert 8 * float(low) / width >= 10, "pixels of the smallest labels"
        assert 10 * float(high) / width <= 16.1, "pixels of the largest"


def drawn_with_backends_named(prefix):
    """Return the figures of a run whose backends have this text before their names, without titles and descriptions."""
    store = RunStore(REPORTS / "backends")
    run = store.run()
    cells = {cell_id: cell | {"backend": prefix + cell["backend"]} for cell_id, cell in run.cells.items()}
    records = [record | {"cell": cells[record["cell_id"]]} for record in store.records()]
    matrix = run.matrix | {"axes": {"backend": [cell["backend"] for cell in cells.values()]}}
    report = build_report(replace(run, cells=cells, matrix=matrix, reference={}), records)
    return [re.sub(r"<(title|desc) .*?</\1>", "", drawing.svg(), flags=re.DOTALL) for drawing in report.figures]


def test_names_of_cells_are_escaped():
    drawn = drawn_with_backends_named("<script>&")
    assert any("&lt;script&gt;&amp;" in svg for svg in drawn)
    assert not any("<script>" in svg for svg in drawn)


@pytest.mark.parametrize("name", [r"$\frac{$", "cost_$2^$"])
def test_dollar_signs_in_names_are_drawn_as_they_are(name):
    """matplotlib reads what is between two of them as a formula, and raises where it is none."""
    assert any(name in svg for svg in drawn_with_backends_named(name))


def test_files_have_the_same_bytes_in_every_process(tmp_path):
    """Draw a run's cells with one camera, whose figures are of the same kinds as those of all."""
    whole, part = RunStore(REPORTS / "busy_host"), RunStore(tmp_path / "run")
    cells = {cell_id: cell for cell_id, cell in whole.run().cells.items() if cell["cams"] == 1}
    part.write_run(replace(whole.run(), cells=cells))
    for record in whole.records():
        if record["cell_id"] in cells:
            part.write_record(record)
    code = (
        "import sys; from pathlib import Path; from benchbox.report.write import write_figures; "
        "print(*(path.name for path in write_figures(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    command = [sys.executable, "-c", code, str(part.path), str(tmp_path / "another")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    keys = ["pareto", "launches", "throughput", "memory", "phases", "ranks", "equivalence-0-loss", "equivalence-0-grad_norm"]
    names = [f"{key}.{suffix}" for key in keys for suffix in ("svg", "pdf", "png")]
    assert done.stdout.split() == names
    assert [path.name for path in write_figures(part.path, tmp_path / "this")] == names
    for path in (tmp_path / "this").iterdir():
        assert path.read_bytes() == (tmp_path / "another" / path.name).read_bytes(), path.name


def luminance(colour):
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_first_colours_of_print_are_apart_in_greyscale_from_white_and_black_text():
    for colour in PRINT.series:
        assert (1.05) / (luminance(colour) + 0.05) > 2, f"{colour} on white"
    values = sorted(luminance(colour) for colour in PRINT.series)
    assert all(later - earlier > 0.01 for earlier, later in pairwise(values))


# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as people without one kind of cones see it.
COLOUR_BLINDNESS = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def seen(colour, matrix):
    """Return the linear RGB of a colour as it is seen."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return [sum(weight * part for weight, part in zip(row, linear, strict=True)) for row in matrix]


def page_colours(theme, prefix):
    style = (Path(__file__).parents[4] / "benchbox/report/templates/style.css").read_text(encoding="utf-8")
    root = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)[theme]
    return [re.search(rf"--{prefix}{number}: (#\w+)", root)[1] for number in range(6)]


@pytest.mark.parametrize("blindness", COLOUR_BLINDNESS)
@pytest.mark.parametrize(
    "colours",
    [PRINT.series, *(page_colours(theme, prefix) for theme in (0, 1) for prefix in "sp")],
    ids=["print", "light series", "light parts", "dark series", "dark parts"],
)
def test_the_first_colours_differ_for_the_colour_blind(colours, blindness):
    matrix = COLOUR_BLINDNESS[blindness]
    for one, other in combinations(colours[:6], 2):
        distance = math.dist(*([max(part, 0) ** (1 / 2.2) for part in seen(colour, matrix)] for colour in (one, other)))
        assert distance > 0.1, (one, other)


def test_more_cells_than_bars_can_show_have_none():
    """The page says where their values are, and Markdown shows only the figures that its tables do not replace."""
    assert not {"throughput", "memory", "phases"} & figures_of("policies_full").keys()
    assert [drawing.key for drawing in report_of("backends").overview_figures] == ["pareto"]
    assert {"throughput", "memory", "phases"} <= figures_of("backends").keys()


def test_a_run_without_launches_has_no_figures():
    store = RunStore(REPORTS / "backends")
    assert build_report(store.run(), []).figures == ()
    assert build_report(replace(store.run(), cells={}), []).figures == ()


def test_the_line_of_an_even_number_of_launches_is_their_median():
    figure = launches._draw("rows: backend", [launches.Row("ddp", [100.0, 102.0, 110.0, 120.0], 0)], PRINT)
    (line,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "-"]
    assert set(line.get_xdata()) == {106.0}
