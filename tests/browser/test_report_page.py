"""The report in a real browser: complete, without errors or requests, legible in both themes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchbox.report import write_reports
from benchbox.store.run import RunStore
from tests.support.chromium import wait_until
from tests.support.commands import run_in_process
from tests.support.example_run import CELL, example_record, example_run, write_example

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=console.error(1)>"


BARS = "[...{root}.querySelectorAll('path')].filter(path => path.style.strokeWidth === '0.6')"

MATRIX = """
name: page
policy: pi05
size: tiny
data: synthetic
world_size: 1
backend: single
batch: 1
axes:
  attention: [sdpa]
measure: {warmup_steps: 1, steps: 2, launches: 1}
"""


@pytest.fixture(scope="module", params=["example", "measured"])
def run(request, tmp_path_factory):
    """Return a made-up run with everything that a report can show, and one that `benchbox run` has measured."""
    folder = tmp_path_factory.mktemp("run")
    if request.param == "example":
        return write_example(folder, policy=HOSTILE).path
    (folder / "page.yaml").write_text(MATRIX)
    completed = run_in_process("run", "page.yaml", "--out", "measured", cwd=folder)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return folder / "measured"


@pytest.fixture(scope="module")
def report(run, tmp_path_factory):
    return write_reports(run, tmp_path_factory.mktemp("report")).html


@pytest.fixture(params=["light", "dark"])
def page(request, browser, report):
    features = [{"name": "prefers-color-scheme", "value": request.param}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    browser.open(report)
    return browser


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text: str, background: str) -> float:
    low, high = sorted((luminance(text), luminance(background)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_has_no_errors_and_makes_no_requests(page):
    assert page.errors() == []
    assert [address for address in page.requests() if not address.startswith("data:")] == [page.address]
    assert page.evaluate("document.title").endswith(" · benchbox")


def test_every_cell_has_a_row_and_every_chart_has_bars(page, run):
    from benchbox.store.run import RunStore

    cells = len(RunStore(run).run().cells)
    assert page.evaluate("document.querySelectorAll('#cells-table tbody tr').length") == cells
    charts = page.evaluate(
        "['throughput', 'memory', 'phases'].map(key => document.querySelector(`#figure-${key} svg`)).map("
        "svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height,"
        f" {BARS.format(root='svg')}.length])"
    )
    for width, height, bars in charts:
        assert width > 300
        assert height > 40
        assert bars >= 1


def test_no_bar_or_label_leaves_its_chart(page):
    outside = page.evaluate(
        "[...document.querySelectorAll('figure svg')].flatMap(svg => {const box = svg.getBoundingClientRect();"
        f" return [...{BARS.format(root='svg')}, ...svg.querySelectorAll('text')]"
        ".filter(item => {const rect = item.getBoundingClientRect();"
        " return rect.left < box.left - 1 || rect.right > box.right + 1 || rect.bottom > box.bottom + 1;})"
        ".map(item => item.textContent)})"
    )
    assert outside == []


def test_the_page_itself_never_scrolls_sideways_even_on_a_telephone(page):
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_text_and_bars_stand_out_from_what_is_behind_them_and_failures_from_success(page, run):
    colours = page.evaluate(
        "(() => {const style = (query, property) => {const element = document.querySelector(query);"
        " return element && getComputedStyle(element)[property]};"
        " return {page: style('body', 'backgroundColor'), card: style('figure', 'backgroundColor'),"
        " ink: style('body', 'color'), soft: style('.soft', 'color'), ok: style('[data-status=ok]', 'color'),"
        " failed: style('[data-status=oom]', 'color'),"
        " texts: [...document.querySelectorAll('figure svg text')].map(text => getComputedStyle(text).fill),"
        f" bars: {BARS.format(root='document')}.map(bar => getComputedStyle(bar).fill)}}}})()"
    )
    failed = [] if run.name == "measured" else [colours["failed"]]
    assert colours["ok"] not in failed
    for behind in ("page", "card"):
        for text in {colours["ink"], colours["soft"], colours["ok"], *failed, *colours["texts"]}:
            assert contrast(text, colours[behind]) >= 4.5, (text, behind)
    assert len(set(colours["texts"])) > 1
    bars = {bar for bar in colours["bars"] if not bar.startswith("url")}
    assert bars
    for bar in bars:
        assert contrast(bar, colours["card"]) >= 2.5, (bar, colours["card"])


def test_the_two_themes_differ(browser, report):
    backgrounds = []
    for theme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        browser.open(report)
        backgrounds.append(luminance(browser.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert backgrounds[0] > 0.8
    assert backgrounds[1] < 0.05


def test_a_click_on_a_header_sorts_the_table_and_says_so(page):
    wait_until(page, "!document.getElementById('cells-tools').hidden")
    heads = page.evaluate("[...document.querySelectorAll('#cells-table thead th')].map(th => th.textContent)")
    column = heads.index("samples/s")
    button = f"document.querySelectorAll('#cells-table thead th')[{column}].querySelector('button').click()"
    read = f"[...document.querySelectorAll('#cells-table tbody tr')].map(row => row.cells[{column}].textContent.trim())"
    page.evaluate(button)
    upwards = page.evaluate(read)
    numbers = [float(text) for text in upwards if text != "-"]
    assert numbers == sorted(numbers)
    assert all(text == "-" for text in upwards[len(numbers) :]), "a cell that failed comes last"
    assert page.evaluate("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "ascending"
    page.evaluate(button)
    downwards = page.evaluate(read)
    assert [float(text) for text in downwards[: len(numbers)]] == numbers[::-1]
    assert all(text == "-" for text in downwards[len(numbers) :])


def test_everything_a_screen_reader_needs_is_there(page):
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("[...document.querySelectorAll('th')].every(th => th.scope)")
    assert page.evaluate(
        "[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('aria-labelledby').split(' ')"
        ".every(id => document.getElementById(id).textContent.length > 10))"
    )
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(item => item.id)")
    assert len(ids) == len(set(ids))


def test_without_scripts_the_page_is_complete(page, report):
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.open(report)
        html = page.call("DOM.getOuterHTML", nodeId=page.call("DOM.getDocument")["root"]["nodeId"])["outerHTML"]
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
    for key in ("throughput", "memory", "phases"):
        assert f'<figure id="figure-{key}"' in html
    assert html.count("<svg") == html.count('class="figure"') == html.count("<figure") >= 3
    assert "<button" not in html


def test_a_path_without_spaces_widens_neither_the_page_nor_the_column_beside_the_status(browser, tmp_path):
    cells = [replace(CELL, weights=f"/checkpoints/{'x' * 300}/{name}.safetensors") for name in ("first", "second")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells, skipped=[{"cell": cells[0].to_dict(), "reason": "y" * 300}]))
    for cell in cells:
        store.write_record(example_record(cell))
    page = write_reports(tmp_path).html
    for width in (390, 1280):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 640)
        browser.open(page)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    status = "document.querySelector('#cells-table [data-status]').getBoundingClientRect().right"
    assert browser.evaluate(status) <= 1280
    reason = "[...document.querySelectorAll('td')].find(td => td.textContent.startsWith('yyy')).getBoundingClientRect().right"
    assert browser.evaluate(reason) <= 1280
