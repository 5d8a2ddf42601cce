"""The pages of `compare`, `eval` and `site` in a real browser: no errors, no requests, accessible, both themes, narrow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchbox.report.comparison.html import render_html
from benchbox.report.evaluation import write_evaluation
from benchbox.report.site.write import write_site
from tests.support.chromium import wait_until
from tests.unit.report.test_comparison import COMPARISON

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

REPORTS = Path(__file__).parents[2] / "reports"


@pytest.fixture(scope="module", params=["compare", "eval", "site index", "site matrix"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    if request.param == "compare":
        page = folder / "comparison.html"
        page.write_text(render_html(COMPARISON), encoding="utf-8")
        return page
    if request.param == "eval":
        return write_evaluation(sorted((REPORTS / "collapse/evaluations").iterdir()), folder)
    site = folder / "site"
    write_site([str(REPORTS / "fsdp_vs_zero2"), str(REPORTS / "data_order")], site)
    return site / "index.html" if request.param == "site index" else next(site.glob("fsdp-vs-zero2*.html"))


@pytest.fixture(
    params=[("light", 1280), ("dark", 1280), ("light", 375), ("dark", 375)], ids=lambda value: "-".join(map(str, value))
)
def page(request, browser, path):
    theme, width = request.param
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 640)
    browser.open(path)
    return browser


def test_a_page_has_no_errors_makes_no_requests_and_fits_the_screen(page, path):
    assert page.errors() == []
    addresses = [address for address in page.requests() if not address.startswith("data:")]
    assert [address for address in addresses if not address.startswith(path.parent.as_uri())] == []
    assert addresses[0] == page.address
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_axe_finds_no_serious_or_moderate_fault(page):
    package = importlib.util.find_spec("axe_core_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core-python is not installed: the page was not checked by axe-core")
    page.evaluate((Path(package.origin).parent / "axe.min.js").read_text())
    page.evaluate("void axe.run().then(result => {window.faults = result.violations})")
    wait_until(page, "window.faults")
    faults = page.evaluate(
        "window.faults.map(fault => [fault.impact, fault.id, fault.nodes.slice(0, 3).map(node => node.html.slice(0, 200))])"
    )
    assert [fault for fault in faults if fault[0] != "minor"] == []
