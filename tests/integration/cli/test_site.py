"""`benchbox site` over real run directories, and over their versions in the commits of a repository."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict, replace

import pytest

from benchbox.errors import EXIT_OK, EXIT_USAGE
from benchbox.report import write_reports
from benchbox.store.revisions import revisions_of
from benchbox.store.run import RunStore
from tests.support.benchmark_files import benchmark_json
from tests.support.chromium import Chromium, find_chromium
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records

HOSTILE = '<script>alert("x")</script>'
LAUNCHES = 5


def git(folder, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def write_run(folder, *, step_s, started, commit=None, cells=(CELL,), name="example"):
    store = RunStore(folder)
    store.write_run(example_run(list(cells), name=name, measure=asdict(MEASURE) | {"launches": LAUNCHES}))
    for cell in cells:
        for record in steady_records(cell, step_s=step_s, started=started, launches=LAUNCHES):
            if commit is not None:
                record["environment"] = record["environment"] | {"git": {"commit": commit, "dirty": False}}
            store.write_record(record)
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A repository whose commits have published a run that became slower in the fourth of six, and the commits measured."""
    root = tmp_path_factory.mktemp("published")
    git(root, "init", "-q")
    measured = []
    for number, step_s in enumerate((0.2, 0.2001, 0.2, 0.25, 0.2501, 0.25)):
        (root / "code.py").write_text(f"# {number}\n")
        git(root, "add", "code.py")
        git(root, "commit", "-qm", f"code {number}")
        measured.append(git(root, "rev-parse", "HEAD"))
        run = write_run(root / "raw" / str(number), step_s=step_s, started=f"2026-01-0{number + 1}", commit=measured[-1])
        write_reports(run, root / "reports" / "example", pack=True)
        git(root, "add", "reports")
        git(root, "commit", "-qm", f"publish {number}")
    return root, measured


@pytest.fixture
def history(published, tmp_path):
    """A copy of the repository, and the commits measured."""
    root, measured = published
    return shutil.copytree(root, tmp_path / "repository"), measured


def test_history_shows_the_change_with_both_commits_and_links_the_report(benchbox, history):
    root, measured = history
    done = benchbox("site", "reports/example", "--history", "--out", "reports/site", cwd=root)
    assert done.returncode == EXIT_OK, done.stderr
    assert done.stdout.splitlines() == ["reports/site/index.html", "reports/site/example.html"]
    index, page = ((root / "reports/site" / name).read_text() for name in ("index.html", "example.html"))
    (row,) = (line for line in index.splitlines() if 'class=" worse"' in line)
    assert f"at {measured[2][:8]}" in row
    assert f"at {measured[3][:8]}" in row
    assert "0.800x" in row
    assert page.count("<svg") == 1, "peaks are constant"
    assert "160.0 MiB in all 6 runs." in page
    assert re.search(r"1[56]\.\d+ samples/s now\.", page)
    assert page.index(measured[2][:8]) < page.index(measured[3][:8])
    assert (root / "reports/site" / "../example/report.html").is_file()
    assert index.count('href="../example/report.html"') == 1, "of the version in the tree, whose figures it shows"
    for text in (index, page):
        assert "<script" not in text
        assert not re.search(r'(src|href)="(https?:)?//', text)


def test_versions_are_those_of_the_commits_that_changed_the_run_the_oldest_first(history, monkeypatch):
    root, _ = history
    monkeypatch.chdir(root)
    subjects = [git(root, "log", "-1", "--format=%s", name.partition(":")[0]) for name, _ in revisions_of("reports/example/")]
    assert subjects == [f"publish {number}" for number in range(6)]
    assert revisions_of("reports/absent") == []


def test_a_run_that_was_committed_with_its_cells_is_read_as_well(benchbox, history):
    root, _ = history
    git(root, "add", "raw/0")
    git(root, "commit", "-qm", "unpacked")
    done = benchbox("compare", "HEAD:raw/0", "raw/3", "--metric", "step_time_s", cwd=root)
    assert "0.2" in done.stdout
    assert "regression" in done.stdout


def test_without_history_there_is_one_run_and_no_chart(benchbox, history):
    root, _ = history
    done = benchbox("site", "reports/example", "--out", "site", cwd=root)
    assert done.returncode == EXIT_OK, done.stderr
    page = (root / "site" / "example.html").read_text()
    assert "<svg" not in page
    assert "Cells of one run" in page


def test_a_baseline_of_a_run_adds_no_second_point(benchbox, tmp_path):
    runs = [
        write_run(tmp_path / f"run{number}", step_s=0.2 + number / 100, started=f"2026-01-0{number + 1}") for number in range(3)
    ]
    assert benchbox("baseline", "promote", runs[2], "--out", "baselines").returncode == EXIT_OK
    (baseline,) = (tmp_path / "baselines").rglob("*.json")
    done = benchbox("site", *runs, baseline, "--out", "site")
    assert done.returncode == EXIT_OK, done.stderr
    assert "3 runs and baselines of 1 cells" in (tmp_path / "site" / "example.html").read_text()


def test_names_from_outside_are_escaped(benchbox, tmp_path):
    cells = [replace(CELL, policy=HOSTILE), replace(CELL, policy="b")]
    runs = [write_run(tmp_path / f"run{n}", step_s=0.2 + n / 50, started=f"2026-01-0{n + 1}", cells=cells) for n in range(3)]
    done = benchbox("site", *runs, "--out", "site", "--title", HOSTILE)
    assert done.returncode == EXIT_OK, done.stderr
    for path in (tmp_path / "site").iterdir():
        assert HOSTILE not in path.read_text()
        assert "&lt;script&gt;" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent",), "absent"),
        (("run", "--metric", "speed"), "unknown metric 'speed'"),
        (("run", "--relevant", "x"), "--relevant"),
    ],
)
def test_wrong_arguments_are_one_line(benchbox, tmp_path, arguments, message):
    write_run(tmp_path / "run", step_s=0.2, started="2026-01-01")
    refused = benchbox("site", *arguments, "--out", "site")
    assert refused.returncode == EXIT_USAGE
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_fit_and_load_nothing_else(benchbox, history, scheme):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is installed")
    root, _ = history
    assert benchbox("site", "reports/example", "--history", "--out", "reports/site", cwd=root).returncode == EXIT_OK
    with Chromium(chromium) as page:
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=True)
        colours = set()
        for name in ("index.html", "example.html"):
            page.open(root / "reports/site" / name)
            assert page.errors() == []
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
            colours.add(page.evaluate("getComputedStyle(document.body).color"))
        stroke = page.evaluate("getComputedStyle(document.querySelector('svg.figure path[style*=\"--accent\"]')).stroke")
        accent = {"light": "rgb(31, 95, 208)", "dark": "rgb(138, 180, 255)"}[scheme]
        assert stroke == accent, "the chart has the colours of the page"
        assert len(colours) == 1


def test_what_has_no_figures_is_left_out_with_the_reason(benchbox, history):
    """Benchmarks, runs in which nothing ended ok or of two versions, and an earlier version that cannot be read."""
    root, _ = history
    (root / "perf.json").write_text(json.dumps(benchmark_json({"test_cost": {}})))
    failed = RunStore(root / "failed")
    failed.write_run(example_run([CELL], name="failed"))
    failed.write_record(example_record(status="oom", error=OOM))
    whole = (root / "reports" / "example" / "records.parquet").read_bytes()
    for content, subject in ((b"PAR1", "damage"), (whole, "mend")):
        (root / "reports" / "example" / "records.parquet").write_bytes(content)
        git(root, "commit", "-qam", subject)
    damaged = git(root, "rev-parse", "--short=10", "HEAD~1")
    mixed = RunStore(write_run(root / "mixed", step_s=0.2, started="2026-01-01", name="mixed"))
    record = next(mixed.records())
    mixed.write_record({**record, "environment": record["environment"] | {"torch": "1.0"}})
    names = ("reports/example", "HEAD~2:reports/example", "perf.json", "failed", "mixed")
    done = benchbox("site", *names, "--history", "--out", "site", cwd=root)
    assert done.returncode == EXIT_OK, done.stderr
    notes = done.stderr.splitlines()
    assert len(notes) == 4
    assert notes[0].startswith(f"note: {damaged}")
    assert "cannot be read as Parquet" in notes[0]
    assert notes[1:] == [
        "note: perf.json: benchmarks of tests have no cells: benchbox compare reads them",
        "note: failed: no launch in it has figures",
        "note: mixed: its launches differ in torch",
    ]
    index = (root / "site" / "index.html").read_text()
    assert "failed.html" not in index
    assert all(note.partition(": ")[2].rpartition(": ")[2] in html.unescape(index) for note in notes[1:])
