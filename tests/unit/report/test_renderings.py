"""The report as HTML, Markdown, text and tables: escaped, self-contained, with the same content."""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from statistics import median

import pytest
from rich.console import Console

from benchbox.report import write_reports
from benchbox.report.embedded import compress_data
from benchbox.report.html import render_html
from benchbox.report.markdown import escape, render_summary
from benchbox.report.rows import print_rows, say
from benchbox.report.terminal import print_table
from benchbox.report.view import build_report
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, write_example
from tests.support.host_states import busy_state

ONE_LAUNCH = asdict(replace(MEASURE, launches=1))
HOSTILE_ELEMENT = "<img src=x onerror=alert(1)>"
HOSTILE = '<script>alert("x")</script>|[red]`'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("run"), policy=HOSTILE).path


@pytest.fixture(scope="module")
def written(run):
    return write_reports(run)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_reports_are_written_into_the_run_or_into_the_folder_requested(run, written, tmp_path):
    assert (written.html, written.markdown) == (run / "report.html", run / "report.md")
    assert (written.csv, written.parquet) == (run / "table.csv", run / "table.parquet")
    elsewhere = write_reports(run, tmp_path / "deep" / "er")
    assert sorted(path.name for path in (tmp_path / "deep" / "er").iterdir()) == [
        "figures",
        "report.html",
        "report.md",
        "table.csv",
        "table.parquet",
    ]
    assert elsewhere.html.read_text() == written.html.read_text()


def test_the_page_is_one_file_without_external_resources(written):
    page = Page(written.html.read_text())
    assert [address for address in page.addresses if not address.startswith("#")] == ["data:,"]
    assert "@import" not in written.html.read_text()
    assert not re.findall(r"url\((?!#)", written.html.read_text()), "fragments of the page itself are clip paths and hatches"


def test_a_policy_named_like_a_script_is_text(written):
    page = Page(written.html.read_text())
    assert page.tags.count("script") == 1
    assert HOSTILE in "".join(page.text)
    assert "<script>alert" not in written.html.read_text()


def test_a_mark_that_reverses_what_follows_is_shown_and_has_no_effect():
    """Without the escape a browser shows this cell as `policy=abretsam_61fb=epicer c`."""
    cells = [replace(CELL, policy="ab\u202ec", recipe=recipe) for recipe in ("bf16_master", "fp32")]
    records = [example_record(cell) for cell in cells]
    text = render_html(build_report(example_run(cells), records))
    assert "\u202e" not in text
    assert "ab\\u202ec" in text


def keys_of_column(report, name):
    """Return what the rows of the page sort by in a column."""
    (data,) = re.findall(r'id="table-data" hidden value="(.*?)"', render_html(report))
    text = gzip.decompress(base64.b64decode(data))
    columns = json.loads(text, parse_constant=pytest.fail)["columns"]  # as a browser reads it
    return next(column["keys"] for column in columns if column["name"] == name)


def test_a_number_that_is_not_finite_leaves_the_data_of_the_page_readable():
    cells = [CELL, replace(CELL, recipe="fp32")]
    records = [example_record(cell) for cell in cells]
    records[0]["loss"][-1] = math.inf
    run = example_run(cells, matrix={"axes": {"recipe": [cell.recipe for cell in cells]}})
    assert keys_of_column(build_report(run, records), "final loss") == [None, records[1]["loss"][-1]]


def test_rows_sort_by_the_figure_that_they_show():
    records = [example_record(launch=launch, step_s=0.2 * launch) for launch in (1, 2)]
    rates = [record["throughput"]["global_samples_per_s"] for record in records]
    assert keys_of_column(build_report(example_run([CELL]), records), "samples/s") == [pytest.approx(median(rates), rel=1e-5)]


def test_the_page_of_a_run_without_any_census_says_that_nothing_is_known_about_precision():
    audited = example_record()
    pages = [render_html(build_report(example_run([CELL]), [record])) for record in (audited, audited | {"precision": None})]
    sentences = ("No rule fired in the 1 cell", "nothing is known about precision")
    assert [[sentence in page for sentence in sentences] for page in pages] == [[True, False], [False, True]]


def replace_texts(value, name):
    """Return a structure of JSON with every text of it replaced by an element that names its place."""
    if isinstance(value, dict):
        return {key: replace_texts(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [replace_texts(item, name) for item in value]
    return f"{name} {HOSTILE_ELEMENT}" if isinstance(value, str) else value


def test_no_text_of_a_record_becomes_an_element_of_the_page(tmp_path):
    """Error, traceback, skip, finding, cell, observation, environment: text from a machine or a library, never markup."""
    record = example_record()
    finding = {"code": "BXP101", "severity": "error", "title": "t", "where": "w", "repair": "r", "rank": 0, "evidence": {}}
    hostile = replace_texts({"finding": finding, "environment": record["environment"] | {"gpus": "g"}, "error": OOM}, "")
    observed = replace_texts(record["observed"], "observed")
    record |= {"precision": record["precision"] | {"findings": [hostile["finding"] | {"severity": "error"}]}}
    failed, reference = replace(CELL, batch=3), replace(CELL, backend="zero2")
    skipped = {"cell": replace(CELL, batch=4).to_dict(), "reason": f"reason {HOSTILE_ELEMENT}"}
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL, failed, reference], skipped=[skipped], measure=ONE_LAUNCH))
    store.write_record(example_record(reference))
    store.write_record(record | {"observed": observed, "environment": hostile["environment"]})
    store.write_record(example_record(failed, status="oom", error=hostile["error"]))
    text = write_reports(tmp_path).html.read_text()
    assert "img" not in Page(text).tags
    shown = "".join(Page(text).text)
    assert f"attention_kernel {HOSTILE_ELEMENT} against" in shown, "why it is not compared with the reference"
    places = [".error.message", ".error.traceback", "reason", ".finding.title", ".finding.where", ".finding.repair"]
    for place in [*places, ".environment.machine", "observed.sharding", "observed.attention_kernel"]:
        assert f"{place} {HOSTILE_ELEMENT}" in shown, place


def test_markdown_shows_names_literally_and_keeps_its_tables_intact(written):
    text = written.markdown.read_text()
    assert "<script>" not in text.replace("\\<script\\>", "")
    for block in text.split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1, block
    assert escape("a|b\nc*d*") == "a\\|b c\\*d\\*"
    assert escape("\x1b[2J") == "\\\\x1b\\[2J", "it clears no terminal that shows it"


def test_data_in_the_page_have_escapes_for_texts_that_are_not_unicode():
    """Such as the name of a file that was not found."""
    data = [["caf\udce9", "größe", None]]
    assert json.loads(gzip.decompress(base64.b64decode(compress_data(data)))) == data


def test_markdown_has_the_content_of_the_page(written):
    text = written.markdown.read_text()
    for part in (
        "**Launches do not settle whether fsdp1\\_full or zero2 trains faster: 4 more of each cell could.**",
        "| fsdp1\\_full | 1 | eager | no | ok | 9.07 | 0.65x \\~ | 441 ms (437..445) | 160 MiB |",
        "OutOfMemoryError: tried to allocate 2.00 GiB",
        "zero3 refuses checkpointing",
        "DeepSpeed clips inside its optimizer step.",
        "- backend=fsdp1\\_full cams=4 attention=eager checkpointing=no: fsdp1\\_full is oom",
        "| samples/s | more is better |",
    ):
        assert part in text


def printed(run, **options):
    stream = io.StringIO()
    print_table(run, Console(file=stream, **options))
    return stream.getvalue()


def test_output_that_is_not_a_terminal_gets_complete_plain_lines(run):
    text = printed(run)
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.startswith("fsdp1_full"))
    assert " ".join(row.split()) == "fsdp1_full 1 eager no ok 9.07 0.65x ~ 441 ms (437..445) 160 MiB eager float32 none"
    failed = "backend=fsdp1_full cams=4 attention=eager checkpointing=no"
    assert f"oom: {failed} (launch 1, rank 1, backward): OutOfMemoryError: tried to allocate 2.00 GiB" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_terminal_gets_a_table_that_fits_it(run, width):
    text = printed(run, force_terminal=True, width=width, color_system=None)
    assert max(len(line) for line in text.splitlines()) <= width
    for word in ("fsdp1_full", "9.07", "441 ms", "160 MiB", "oom", "0.65x"):
        assert word in text


def test_cells_that_have_not_run_are_counted_and_not_listed(tmp_path):
    """Two lines about what ran, as after `--only`, must not be among a hundred about what did not."""
    cells = [replace(CELL, backend=backend, cams=cams) for cams in (1, 4) for backend in ("ddp", "zero2")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells))
    store.write_record(example_record(cells[0]))
    text = printed(tmp_path)
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("ddp", "zero2"))] == ["ddp"]
    assert "3 cells have not run\n" in text
    assert [line.partition(": ")[0] for line in text.splitlines() if line.startswith("cams=")] == ["cams=1"]
    assert "missing" not in text
    assert "No answer: no set-up was measured." in write_reports(tmp_path).markdown.read_text()


def test_names_are_never_read_as_markup():
    stream = io.StringIO()
    for terminal in (True, False):
        print_rows(Console(file=stream, force_terminal=terminal, color_system=None), ["name"], [["[red]x[/red]"]])
    assert stream.getvalue().count("[red]x[/red]") == 2


def test_names_and_errors_of_records_do_not_control_the_terminal():
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=terminal, color_system=None)
        print_rows(console, ["name"], [["\x1b[2Jcell"]])
        say(console, "one\x1b]0;title\x07\ntwo \x9b31m größe")
        assert not set(stream.getvalue()) & {"\x1b", "\x07", "\x9b"}
        for text in (r"\x1b[2Jcell", "one\\x1b]0;title\\x07\ntwo \\x9b31m größe\n"):
            assert text in stream.getvalue()


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory):
    """A cell launched once on a busy host, and one whose two launches differ by half."""
    store = RunStore(tmp_path_factory.mktemp("doubtful"))
    store.write_run(example_run([CELL], measure=ONE_LAUNCH))
    store.write_record({**example_record(), "host": busy_state()})
    spread = RunStore(tmp_path_factory.mktemp("spread"))
    spread.write_run(example_run([CELL]))
    for launch in (1, 2):
        record = example_record(launch=launch, step_s=0.2 * launch)
        del record["host"]  # as older ones
        spread.write_record(record)
    return store.path, spread.path


def test_every_table_marks_cells_of_one_launch_of_a_high_spread_and_of_a_busy_host_and_explains_the_mark(doubtful):
    once, spread = doubtful
    for path, text, note in (
        (once, "ok (one launch, busy host)", "busy host: in a launch of the cell, "),
        (once, "ok (one launch, busy host)", "one launch: the cell was launched once"),
        (
            spread,
            "ok (high spread)",
            "high spread: the step times of the slowest and the fastest launch differ by more than 10% of",
        ),
    ):
        files = write_reports(path)
        page = " ".join(Page(files.html.read_text()).text)
        mark = text.removeprefix("ok (").removesuffix(")")
        assert f"ok {mark}" in " ".join(page.split())
        assert note in page
        markdown = files.markdown.read_text()
        assert f"| {text} |" in markdown
        assert note in markdown
        assert text in printed(path)
        assert note in printed(path)
        terminal = " ".join(printed(path, force_terminal=True, width=200, color_system=None).split())
        assert all(word in terminal for word in mark.split(", "))


def test_the_page_gives_the_launch_and_the_cause_of_a_busy_host_and_its_state(doubtful):
    page = write_reports(doubtful[0]).html.read_text()
    assert "1 of 1 launches ok; launch 1: other processes used 18% of the CPU time" in page
    assert "CPU time: launch 80%, other processes 18%, hypervisor 0%, load average 2.50" in page


def test_tables_have_columns_of_the_host_where_a_launch_recorded_it(doubtful):
    once, spread = (write_reports(path).csv.read_text().splitlines() for path in doubtful)
    assert "host.busy,host.other_cpu_share,host.energy_j_per_sample" in once[0]
    assert "other processes used 18% of the CPU time,0.18" in once[1]
    assert "host." not in spread[0]


def test_the_summary_of_a_job_names_findings_that_ask_for_something_and_no_others():
    finding = {"title": "t", "where": "w", "rank": 0, "evidence": {}, "repair": "r", "cause": None, "locations": []}
    record = example_record()
    record["precision"]["findings"] = [
        finding | {"code": code, "severity": severity} for code, severity in (("BXP202", "info"), ("BXP301", "warning"))
    ]
    text = render_summary(build_report(example_run([CELL], measure=ONE_LAUNCH), [record]))
    assert "- BXP301 warning: t\n" in text
    assert "BXP202" not in text
