"""The report of a large run in a real browser: filters, columns, cards, narrow screens, paper, no scripts, accessibility."""

from __future__ import annotations

import base64
import csv
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from benchbox.report import write_reports
from benchbox.report.html import render_html
from benchbox.report.view import build_report
from tests.support.chromium import wait_until
from tests.support.large_runs import PUBLISHED, published_cells
from tests.support.tiers import in_tiers

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELLS = 680
PAGE_HEIGHT = 190 / 25.4 * 96  # CSS pixels of A4 landscape between its margins
COUNTER = "document.querySelector('.counter').textContent"
READY = "!document.getElementById('cells-tools').hidden"
COLUMN = "[...document.querySelectorAll('#cells-table thead th')].findIndex(th => th.textContent === '{name}')"


SEARCH = (
    "(() => {{const start = performance.now(), box = document.getElementById('cells-search'); box.value = '{text}';"
    " box.dispatchEvent(new Event('input')); document.body.offsetHeight; return performance.now() - start}})()"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_reports(PUBLISHED, tmp_path_factory.mktemp("report")).html


@pytest.fixture
def page(browser, report):
    show(browser, report)
    wait_until(browser, READY)
    return browser


def show(browser, path, *, theme="light", width=1280):
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 640)
    browser.open(path)


def tick(page, menu, text):
    page.evaluate(
        f"[...document.querySelectorAll('details.menu')].find(menu => menu.firstElementChild.textContent.startsWith('{menu}'))"
        f".querySelectorAll('label').forEach(label => {{if (label.textContent.trim().startsWith('{text}')) label.click()}})"
    )


def values(page, name):
    number = page.evaluate(COLUMN.format(name=name))
    return page.evaluate(
        f"[...document.querySelectorAll('#cells-table tbody tr')].map(row => row.cells[{number}].textContent.trim())"
    )


def test_a_large_page_has_no_errors_and_makes_no_requests(page):
    assert page.errors() == []
    assert [address for address in page.requests() if not address.startswith(("data:", "about:"))] == [page.address]
    assert page.evaluate(COUNTER) == "680 of 680 cells"


def test_filters_of_two_axes_and_a_search_hold_together(page):
    tick(page, "backend", "zero2 ")
    assert page.evaluate(COUNTER) == "80 of 680 cells"
    tick(page, "policy", "pi05 ")
    assert page.evaluate(COUNTER) == "8 of 680 cells"
    assert set(values(page, "backend")) == {"zero2"}
    assert set(values(page, "policy")) == {"pi05"}
    page.evaluate(SEARCH.format(text="Flash zero2"))
    assert page.evaluate(COUNTER) == "4 of 680 cells"
    assert set(values(page, "attention")) == {"sdpa"}


@pytest.mark.parametrize("clicks", [1, 2])
def test_the_address_of_a_view_shows_the_same_view(page, clicks):
    """A second click on a header sorts downwards."""
    tick(page, "backend", "zero2 ")
    tick(page, "Columns", "step")
    page.evaluate(SEARCH.format(text="flash"))
    header = "[...document.querySelectorAll('#cells-table thead button')].find(b => b.textContent === 'samples/s')"
    for _ in range(clicks):
        page.evaluate(f"{header}.click()")
    shown, fragment = values(page, "samples/s"), page.evaluate("location.hash")
    page.call("Page.navigate", url="about:blank")  # a change of the fragment alone would load nothing
    wait_until(page, "location.href === 'about:blank'")
    page.call("Page.navigate", url=f"{page.address}{fragment}")
    wait_until(page, f"document.querySelector('.counter') && {READY}")
    assert page.evaluate(COUNTER) == "40 of 680 cells"
    assert page.evaluate("document.getElementById('cells-search').value") == "flash"
    assert values(page, "samples/s") == shown == sorted(shown, key=float, reverse=clicks == 2)
    number = page.evaluate(COLUMN.format(name="step"))
    hidden = f"getComputedStyle(document.querySelector('#cells-table tbody tr').cells[{number}]).display"
    assert page.evaluate(hidden) == "none"


def test_a_card_opens_on_demand_and_its_command_can_be_copied(page):
    assert page.evaluate("document.querySelector('.cell-card')") is None
    page.evaluate("document.querySelectorAll('#cells-table tbody a')[8].click()")
    wait_until(page, "document.querySelector('#cell-9[open]')")
    command = page.evaluate("document.querySelector('#cell-9 .command').textContent")
    only = "policy=pi0, backend=ddp, world_size=2, batch=2, cams=1, attention=eager, checkpointing=false"
    assert shlex.split(command) == ["benchbox", "run", "matrices/policies_full.yaml", "--only", only]
    page.evaluate("navigator.clipboard.writeText = async (text) => {window.copied = text}")
    page.evaluate("document.querySelector('#cell-9 .copy').click()")
    wait_until(page, "document.querySelector('#cell-9 .copy').textContent === 'Copied'")
    assert page.evaluate("window.copied") == command
    titles = page.evaluate("[...document.querySelectorAll('#cell-9 caption')].map(caption => caption.textContent)")
    assert {"Measured", "Observed beside requested", "Launches", "Configuration"} < set(titles)


def downloaded(page, title):
    """Return file name and text of what a button of the table gives to the browser to save."""
    page.evaluate(
        "window.saved = null;"
        " URL.createObjectURL = blob => {blob.text().then(text => {window.saved = text}); return 'blob:none'};"
        " HTMLAnchorElement.prototype.click = function () {window.file = this.download};"
        f" [...document.querySelectorAll('#cells-tools button')].find(b => b.textContent === '{title}').click()"
    )
    wait_until(page, "window.saved !== null")
    return page.evaluate("window.file"), page.evaluate("window.saved")


def test_matching_cells_are_downloaded_as_csv_and_json_without_a_request(page):
    tick(page, "backend", "zero2 ")
    requests = len(page.requests())
    file, text = downloaded(page, "Download CSV")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert file == "cells.csv"
    assert {row["backend"] for row in rows} == {"zero2"}
    assert len(rows) == 80
    with (PUBLISHED / "table.csv").open() as stream:
        measured = [row for row in csv.DictReader(stream) if row["backend"] == "zero2"]
    speeds = [float(row["samples/s"]) for row in rows if row["samples/s"]]
    assert speeds == pytest.approx([float(row["global_samples_per_s"]) for row in measured], rel=1e-5)
    file, text = downloaded(page, "Download JSON")
    cells = json.loads(text)["cells"]
    assert file == "cells.json"
    assert [cell["values"]["samples/s"] for cell in cells] == speeds
    assert cells[0]["command"].startswith("benchbox run")
    assert "backend" in {fact["name"] for fact in cells[0]["facts"]["Configuration"]}
    assert len(page.requests()) == requests


def test_a_small_page_gives_the_same_json_from_its_cards(browser, tmp_path):
    run, records = published_cells(3)
    report = build_report(run, records)
    path = tmp_path / "report.html"
    path.write_text(render_html(report), encoding="utf-8")
    show(browser, path)
    wait_until(browser, READY)
    cells = json.loads(downloaded(browser, "Download JSON")[1])["cells"]
    assert [cell["title"] for cell in cells] == [card.title for card in report.cards]
    configuration = {fact["name"]: fact["text"] for fact in cells[0]["facts"]["Configuration"]}
    assert configuration["backend"] == records[0]["cell"]["backend"]
    rows = {group.title: group.rows for group in report.cards[0].groups}["Launches"]
    assert [(fact["name"], fact["text"], fact["remark"]) for fact in cells[0]["facts"]["Launches"]] == list(rows)


def test_header_and_first_column_stay_in_view(page):
    page.call("Emulation.setDeviceMetricsOverride", width=700, height=700, deviceScaleFactor=1, mobile=False)
    page.evaluate("Object.assign(document.querySelector('.sheet:has(#cells-table)'), {scrollTop: 900, scrollLeft: 300})")
    offsets = page.evaluate(
        "(() => {const box = (selector, index) => document.querySelectorAll(selector)[index].getBoundingClientRect();"
        " const sheet = box('.sheet:has(#cells-table)', 0);"
        " return [box('#cells-table thead th', 3).top - sheet.top, box('#cells-table tbody th', 30).left - sheet.left]})()"
    )
    assert max(map(abs, offsets)) <= 2


def test_a_telephone_shows_status_throughput_memory_and_findings_of_every_row(browser, report):
    show(browser, report, width=375)
    wait_until(browser, READY)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
    for name in ("status", "samples/s", "peak allocated", "findings"):
        number = browser.evaluate(COLUMN.format(name=name))
        cell = f"document.querySelector('#cells-table tbody tr').cells[{number}]"
        left, right = browser.evaluate(
            f"(() => {{const box = {cell}.getBoundingClientRect(); return [box.left, box.right]}})()"
        )
        assert 0 <= left < right <= 375, name
        assert browser.evaluate(f"getComputedStyle({cell}, '::before').content") == f'"{name}"'


# 150 cells take 11 pages and 680 take 26, of which 7 have no rows: both bounds allow rows of 1.7 times the height.
@pytest.mark.parametrize(("cells", "pages"), in_tiers([(150, (8, 14)), (CELLS, (10, 40))], lambda case: case[0] != CELLS))
def test_paper_has_every_cell_with_the_columns_that_matter_on_few_pages(browser, tmp_path, cells, pages):
    path = tmp_path / "report.html"
    path.write_text(render_html(build_report(*published_cells(cells))), encoding="utf-8")
    page = browser
    show(page, path)
    wait_until(page, READY)
    page.call("Emulation.setEmulatedMedia", media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.querySelectorAll('#cells-table tbody tr').length") == cells
    for name in ("status", "samples/s", "peak allocated", "findings"):
        number = page.evaluate(COLUMN.format(name=name))
        assert (
            page.evaluate(
                f"document.querySelectorAll('#cells-table tbody tr')[{cells - 1}].cells[{number}].getBoundingClientRect().width"
            )
            > 10
        )
    heights = page.evaluate("[...document.querySelectorAll('figure')].map(figure => figure.getBoundingClientRect().height)")
    assert heights
    assert max(heights) <= PAGE_HEIGHT
    page.call("Emulation.setEmulatedMedia", media="")
    document = page.call("Page.printToPDF", preferCSSPageSize=True)["data"]
    printed = len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(document)))
    print(f"\n{cells} cells print on {printed} pages")
    least, most = pages
    assert least <= printed <= most


def test_without_scripts_the_table_has_every_cell_and_the_page_says_where_the_cards_are(browser, report):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show(browser, report)
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        rows = browser.call("DOM.querySelectorAll", nodeId=root, selector="#cells-table tbody tr")["nodeIds"]
        html = browser.call("DOM.getOuterHTML", nodeId=root)["outerHTML"]
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert len(rows) == CELLS
    assert "table.csv" in html


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 375)])
def test_axe_finds_no_serious_or_moderate_fault(browser, tmp_path, theme, width):
    package = importlib.util.find_spec("axe_core_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core-python is not installed: the page was not checked by axe-core")
    path = tmp_path / "report.html"
    path.write_text(render_html(build_report(*published_cells(45))), encoding="utf-8")  # axe needs seconds for 100 rows
    show(browser, path, theme=theme, width=width)
    wait_until(browser, READY)
    browser.evaluate("document.querySelector('#cells-table tbody a').click()")
    wait_until(browser, "document.querySelector('#cell-1[open]')")
    browser.evaluate((Path(package.origin).parent / "axe.min.js").read_text())
    browser.evaluate("void axe.run().then(result => {window.faults = result.violations})")
    wait_until(browser, "window.faults")
    faults = browser.evaluate(
        "window.faults.map(fault => [fault.impact, fault.id, fault.nodes.slice(0, 3).map(node => node.html.slice(0, 200))])"
    )
    assert [fault for fault in faults if fault[0] != "minor"] == []


@pytest.mark.exhaustive
def test_ten_thousand_cells_are_filtered_in_the_page(browser, tmp_path):
    run, records = published_cells(10_000)
    path = tmp_path / "report.html"
    path.write_text(render_html(build_report(run, records)), encoding="utf-8")
    show(browser, path)
    wait_until(browser, READY)
    milliseconds = browser.evaluate(SEARCH.format(text="vitra zero2"))
    expected = sum(cell["policy"] == "vitra" and cell["backend"] == "zero2" for cell in run.cells.values())
    print(f"\n10,000 cells: filtered in {milliseconds:.0f} ms")
    assert browser.evaluate(COUNTER) == f"{expected} of 10000 cells"
