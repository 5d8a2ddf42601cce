"""Cost of planning, tables and reports at scale: ten times the cells or launches cost about ten times the CPU time."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.analysis.summary import summarize
from benchbox.plan import plan
from benchbox.report.printed_tables import REPORT_INVARIANTS
from benchbox.report.view import build_report
from benchbox.spec import load_matrix
from benchbox.spec.cell import Cell
from benchbox.store.record import share_equal_values
from benchbox.store.run import RunStore
from benchbox.store.table import LaunchTable, launch_table
from tests.support.example_run import CELL, MIB, example_record, example_run
from tests.support.ratios import record_ratio

pytestmark = pytest.mark.perf

# A cost that grows with the square of the number would grow 100 times. Garbage collection and caches explain up to twice 10.
MAX_GROWTH = 20.0


def cpu_seconds(function, *arguments):
    """Return the least CPU time of three calls: other processes on the machine add to it, and never take from it."""
    times = []
    for _ in range(3):
        start = time.process_time()
        function(*arguments)
        times.append(time.process_time() - start)
    return min(times)


def assert_linear(benchmark, name, small, large, seconds):
    growth = seconds[1] / seconds[0]
    print(f"\n{name}: {small} in {seconds[0]:.3f} s, {large} in {seconds[1]:.3f} s of CPU time: {growth:.1f} times")
    record_ratio(benchmark, f"{name}_growth_over_size", growth / (large / small), better="lower", goal=MAX_GROWTH / 10)
    assert growth < MAX_GROWTH


def traced_peak(work):
    """Return the largest number of bytes that a call holds at once, and what it returns.

    Garbage in cycles counts until a full collection, which Python puts off until a quarter of all that is alive is new. What
    was alive before is set aside, so that the result does not depend on what the process has imported.

    The least of two calls counts: Python's table of interned strings, of which each path has new ones, grows by megabytes at
    once when it is full, on average once in many calls.
    """
    peaks = []
    for _ in range(2):
        gc.collect()
        gc.freeze()
        gc.collect()
        tracemalloc.start()
        result = work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        gc.unfreeze()
    return min(peaks), result


def write_matrix(folder, cells):
    path = folder / f"m{cells}.yaml"
    axes = f"{{backend: [ddp, fsdp2], batch: {list(range(1, 51))}, seed: {list(range(cells // 100))}}}"
    path.write_text(f"name: big\npolicy: pi05\nsize: tiny\ndata: synthetic\nworld_size: 2\naxes: {axes}\n")
    return path


def test_planning_grows_with_the_number_of_cells(benchmark, tmp_path):
    def load_and_plan(path):
        return plan(load_matrix(path, {}, []))

    small, large = (write_matrix(tmp_path, cells) for cells in (3_000, 30_000))
    assert len(load_and_plan(small).cells) == 3_000
    seconds = benchmark.pedantic(lambda: [cpu_seconds(load_and_plan, path) for path in (small, large)], rounds=1)
    assert_linear(benchmark, "planning", 3_000, 30_000, seconds)


@pytest.fixture(scope="module")
def runs():
    """Runs of 500 and 5,000 launches, ten of each cell, every cell compared with one of its own."""

    def run_of(launches):
        template = [example_record(CELL, number) for number in range(1, 11)]
        cells = [replace(CELL, seed=seed, backend=name) for seed in range(launches // 20) for name in ("ddp", "zero2")]
        run = example_run(cells)
        measure = dict(run.measure) | {"launches": 10}
        records = [record | {"cell": run.cells[cell.cell_id], "cell_id": cell.cell_id} for cell in cells for record in template]
        return replace(run, measure=measure), records

    return run_of(500), run_of(5_000)


def test_tables_grow_with_the_number_of_launches(benchmark, runs):
    seconds = benchmark.pedantic(lambda: [cpu_seconds(launch_table, records) for _, records in runs], rounds=1)
    assert_linear(benchmark, "tables", 500, 5_000, seconds)


def test_reports_grow_with_the_number_of_launches(benchmark, runs):
    seconds = benchmark.pedantic(lambda: [cpu_seconds(build_report, run, records) for run, records in runs], rounds=1)
    assert_linear(benchmark, "reports", 500, 5_000, seconds)


def read_records(cells, launches):
    """Yield records as a run directory yields them: parsed, with what they have in common in memory once."""
    previous = {}
    for cell in cells:
        for number in range(1, launches // len(cells) + 1):
            text = json.dumps(example_record(cell, number, step_s=0.2 + (cell.seed + number) / 1e6))
            previous = share_equal_values(json.loads(text), previous)
            yield previous


def peak_bytes(work, launches, cells):
    """Return the most memory that work on a run of so many launches takes; it is called with the run and its records."""
    cells = [replace(CELL, seed=seed) for seed in range(cells)]
    run = example_run(cells)
    run = replace(run, measure={**run.measure, "launches": launches // len(cells)})
    return traced_peak(lambda: work(run, read_records(cells, launches)))[0]


def test_judging_a_run_keeps_less_than_half_of_the_memory_of_its_records(benchmark):
    """`check` reads records one at a time, and keeps what thresholds and baselines are judged by."""
    peak_bytes(summarize, 10, cells=1)  # what is imported by the first call is none of its memory
    judged = benchmark.pedantic(lambda: peak_bytes(summarize, 400, cells=40), rounds=1)
    whole = peak_bytes(lambda _, records: list(records), 400, cells=40)
    print(f"\njudging 400 launches: {judged / MIB:.1f} MiB; with all records {whole / MIB:.1f} MiB: {judged / whole:.2f}")
    record_ratio(benchmark, "memory_of_judging_over_records", judged / whole, better="lower", goal=0.5)
    assert judged < whole / 2


def test_a_launch_takes_no_more_memory_than_its_numbers(benchmark):
    """They are what ratios and figures need; the rest of a record is kept once for each cell."""
    peak_bytes(summarize, 100, cells=10)  # as above
    small, large = benchmark.pedantic(
        lambda: [peak_bytes(summarize, launches, cells=10) for launches in (500, 1_000)], rounds=1
    )
    growth, record_bytes = (large - small) / 500, len(json.dumps(example_record()))
    print(f"\nsummarizing: {growth:.0f} bytes for each launch, of {record_bytes} of JSON")
    record_ratio(benchmark, "memory_of_summarizing_over_record", growth / record_bytes, better="lower")
    assert growth < 1024


def test_the_memory_of_a_table_does_not_grow_with_its_rows(benchmark, tmp_path):
    record = example_record()

    def peak_of(rows):
        def write_table():
            with LaunchTable() as table:
                for number in range(1, rows + 1):
                    table.add({**record, "launch": number})
                table.write(tmp_path)

        return traced_peak(write_table)[0]

    peak_of(300)  # as above
    small, large = benchmark.pedantic(lambda: (peak_of(300), peak_of(3_000)), rounds=1)
    print(f"\ntables: {small / MIB:.2f} MiB for 300 rows, {large / MIB:.2f} MiB for 3,000: {large / small:.2f}")
    record_ratio(benchmark, "memory_of_tables_growth", large / small, better="lower", goal=1.1)
    assert large < 1.1 * small


# Its own peak: that of a child as its parent learns it is at least what the parent had when it forked.
REPORT = """
import re, sys
from pathlib import Path
from benchbox.report.write import write_reports
write_reports(Path(sys.argv[1]))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_a_report_takes_a_few_kilobytes_of_memory_for_each_launch(benchmark, tmp_path):
    """In a process of its own, whose resident memory has the tables, cards and figures as well."""

    def peak_of(launches):
        cells = [replace(CELL, seed=seed) for seed in range(10)]
        store = RunStore(tmp_path / str(launches))
        store.write_run(replace(example_run(cells), measure={"warmup_steps": 1, "steps": 4, "launches": launches // 10}))
        for cell in cells:
            for number in range(1, launches // 10 + 1):
                store.write_record(example_record(cell, number, step_s=0.2 + number / 1e6))
        printed = subprocess.run([sys.executable, "-c", REPORT, store.path], capture_output=True, text=True, check=True).stdout
        return int(printed) * 1024

    small, large = benchmark.pedantic(lambda: (peak_of(200), peak_of(1_700)), rounds=1)
    growth, record_bytes = (large - small) / 1_500, len(json.dumps(example_record()))
    peaks = f"{small / MIB:.0f} MiB for 200 launches, {large / MIB:.0f} MiB for 1,700"
    print(f"\nreporting: {peaks}: {growth / 1024:.1f} KiB for each launch, of {record_bytes / 1024:.1f} KiB of JSON")
    record_ratio(benchmark, "memory_of_reporting_over_record", growth / record_bytes, better="lower")
    assert growth < 0.5 * record_bytes  # holding all records takes 1.06


def test_verifying_takes_a_few_kilobytes_of_memory_for_each_launch(benchmark, tmp_path):
    """Records are read one at a time. What grows are the chain, the spans of launches and what a report needs."""

    def peak_of(launches):
        run = replace(example_run([replace(CELL, seed=seed) for seed in range(launches // 10)]), reference={"backend": "ddp"})
        store = RunStore(Path(tempfile.mkdtemp(dir=tmp_path)))
        store.write_run(run)
        for cell in run.cells.values():
            for number in range(1, 11):
                store.write_record(example_record(Cell.from_dict(cell), number))
        (store.path / "report.md").write_text("")
        return traced_peak(lambda: verify_run(store, REPORT_INVARIANTS))[0]

    peak_of(250)  # as above
    small, large = benchmark.pedantic(lambda: (peak_of(100), peak_of(250)), rounds=1)
    growth = (large - small) / 150
    print(
        f"\nverifying: {growth / 1024:.1f} KiB for each launch, of {len(json.dumps(example_record())) / 1024:.1f} KiB of JSON"
    )
    record_bytes = len(json.dumps(example_record()))
    record_ratio(benchmark, "memory_of_verifying_over_record", growth / record_bytes, better="lower")
    assert growth < record_bytes
