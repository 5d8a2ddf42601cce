"""`benchbox verify` as an adversary would be met: each corruption of a real run is rejected for its own reason."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchbox.analysis.invariants import verify_records, verify_run
from benchbox.errors import EXIT_OK, EXIT_THRESHOLD
from benchbox.report.printed_tables import REPORT_INVARIANTS
from benchbox.spec.cell import Cell
from benchbox.store.files import write_json
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.record_corruptions import RECORD_CORRUPTIONS, edit, relabel, scale_times

MATRIX = """\
name: small
policy: pi07_low_level
size: tiny
data: synthetic
world_size: 2
axes: {backend: [ddp, fsdp2]}
batch: 1
measure: {warmup_steps: 1, steps: 2, launches: 2}
reference: {backend: ddp}
"""


def benchbox(*arguments):
    return run_in_process(*arguments, variables={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two backends, each launched twice: the only launches of this file."""
    folder = tmp_path_factory.mktemp("verify")
    matrix = folder / "small.yaml"
    matrix.write_text(MATRIX)
    done = benchbox("run", matrix, "--out", folder / "run")
    assert done.returncode == EXIT_OK, done.stderr
    assert re.search(r"^chain of 5 entries, head [0-9a-f]{64}$", done.stdout, re.MULTILINE)
    return folder / "run"


@pytest.fixture
def run(measured, tmp_path):
    return RunStore(Path(shutil.copytree(measured, tmp_path / "run")))


@pytest.fixture(scope="module")
def records(measured):
    return {record["cell"]["backend"]: record for record in RunStore(measured).records()}


def test_the_untouched_run_violates_nothing_and_every_invariant_of_its_files_applies(run):
    result = verify_run(run, REPORT_INVARIANTS)
    assert result.violations == ()
    assert [sentence for sentence, count in result.not_applicable.items() if count == len(list(run.records()))] == [
        "reserved >= allocated memory, on every rank",
        "MFU and HFU are between 0 and 1, or null",
        "an error is of a rank, stage, step and phase that there are",
        "no peak is above the memory limit, on a host by more than 1%",
        "HFU is not below MFU",
    ]


@pytest.mark.parametrize("corruption", RECORD_CORRUPTIONS)
def test_a_corrupt_record_is_rejected_for_its_own_reason(records, corruption):
    backend, corrupt, sentence, fragment = RECORD_CORRUPTIONS[corruption]
    record = deepcopy(records[backend])
    assert verify_records([record]).violations == ()
    corrupt(record)
    messages = [violation.message for violation in verify_records([record]).violations if violation.sentence == sentence]
    assert any(fragment in message for message in messages), messages


@pytest.mark.parametrize("padding", ["full", "longest"])
def test_a_record_of_before_sizes_of_micro_batches_were_observed_is_valid(records, padding):
    record = deepcopy(records["ddp"])
    relabel(record, padding=padding)
    del record["observed"]["micro_batch_sizes"], record["observed"]["micro_batch_sizes_reason"]
    assert verify_records([record]).violations == ()


def test_unknown_sizes_of_micro_batches_are_valid_with_a_reason(records):
    record = deepcopy(records["ddp"])
    record["observed"] |= {"micro_batch_sizes": [None, None], "micro_batch_sizes_reason": "the policy generates its batches"}
    assert verify_records([record]).violations == ()


def path_of(run, backend="ddp", launch=1):
    cell_id = next(cell_id for cell_id, cell in run.run().cells.items() if cell["backend"] == backend)
    return run.record_path(cell_id, launch)


def edit_record(run, corrupt, launch=1):
    path = path_of(run, launch=launch)
    record = json.loads(path.read_text())
    corrupt(record)
    write_json(path, record)


def faster_with_rank_files(run):
    edit_record(run, lambda record: scale_times(record, 2.0))
    for rank in range(2):
        file = path_of(run).with_suffix("") / f"rank{rank}.json"
        result = json.loads(file.read_text())
        result["step_time_s"] = [2.0 * step for step in result["step_time_s"]]
        result["phases_s"] = {name: [2.0 * step for step in steps] for name, steps in result["phases_s"].items()}
        write_json(file, result)


def swap_parts(record):
    parts = record["step_split_s"]
    parts["compute"], parts["transfer"] = parts["transfer"], parts["compute"]


def swap_launches(run):
    first, second = (json.loads(path_of(run, launch=launch).read_text()) for launch in (1, 2))
    write_json(path_of(run, launch=1), second | {"launch": 1})
    write_json(path_of(run, launch=2), first | {"launch": 2})


def edit_lines(run, change):
    lines = run.chain.path.read_text().splitlines(keepends=True)
    run.chain.path.write_text("".join(change(lines)))


def edit_plan(run, change):
    values = json.loads((run.path / "run.json").read_text())
    change(values)
    write_json(run.path / "run.json", values)


def restore_an_earlier_record(run):
    earlier = path_of(run).read_text()
    run.write_record(json.loads(earlier) | {"duration_s": 99.0})
    path_of(run).write_text(earlier)


def edit_text(run, name, old, new):
    path = run.path / name
    text = path.read_text()
    path.write_text(re.sub(old, new, text, count=1))
    assert path.read_text() != text


def drop_a_row(run):
    path = run.path / "table.parquet"
    pd.read_parquet(path).iloc[1:].to_parquet(path, index=False)


def double_all_flops(record):
    flops = record["flops"]
    flops["model_flops_per_step"] *= 2
    for tower in flops["per_tower"].values():
        tower |= {name: 2 * tower[name] for name in ("forward", "backward")}


FILES, FACTS = "records are what their ranks wrote", "precision is what the facts of the ranks give"
CHAIN, TABLES = "records are those that the chain has", "tables are those of the records"
MEASURED = "launches were measured as the plan asks"
REPORT = "tables of the report follow from the records"

RUN_CORRUPTIONS = {
    "a faster launch": (
        lambda run: edit_record(run, lambda record: scale_times(record, 0.5)),
        "records are what their ranks wrote",
        "step_time_s differs from the results of its ranks",
    ),
    "an edited loss curve": (
        lambda run: edit_record(run, edit("loss", [3.0, 2.0, 1.0])),
        "records are what their ranks wrote",
        "loss differs",
    ),
    "a wait that was work": (
        lambda run: edit_record(run, swap_parts),
        FILES,
        "step_split_s differs from the results of its ranks",
    ),
    "another memory limit": (
        lambda run: edit_record(run, edit("memory_limit_bytes", 2**40)),
        FILES,
        "memory_limit_bytes differs from the job of its ranks",
    ),
    "a plan of more steps": (
        lambda run: edit_plan(run, edit("measure.steps", 50)),
        MEASURED,
        "it was measured with steps 2, and the plan asks for 50: the same command, without --only, measures it again",
    ),
    "a plan with a memory limit": (
        lambda run: edit_plan(run, edit("measure.memory_limit", 2**30)),
        MEASURED,
        "it was measured with memory_limit None, and the plan asks for 1073741824",
    ),
    "findings that are gone": (
        lambda run: edit_record(run, edit("precision.findings", [])),
        FACTS,
        "precision.findings differs from the facts of its ranks",
    ),
    "another descent quality": (
        lambda run: edit_record(run, edit("precision.numbers.edq", 1.0)),
        FACTS,
        "precision.numbers differs from the facts of its ranks",
    ),
    "a slower launch with the results of its ranks": (
        faster_with_rank_files,
        "step times agree with the events of the ranks",
        "lie between its events",
    ),
    "a rank that did not end": (
        lambda run: edit_text(run, path_of(run).with_suffix("") / "events-rank1.jsonl", r"\{[^}]*done[^}]*\}\n", ""),
        "step times agree with the events of the ranks",
        "its last event is not done",
    ),
    "an edited record": (lambda run: edit_record(run, edit("duration_s", 99.0)), CHAIN, "edited after it was measured"),
    "a removed record": (lambda run: path_of(run).unlink(), CHAIN, "was removed"),
    "records in another order": (swap_launches, CHAIN, "edited after it was measured"),
    "an earlier record": (restore_an_earlier_record, CHAIN, "an earlier record of this launch"),
    "a removed line of the chain": (
        lambda run: edit_lines(run, lambda lines: [*lines[:2], *lines[3:]]),
        CHAIN,
        "line 3 does not follow",
    ),
    "a chain in another order": (
        lambda run: edit_lines(run, lambda lines: [lines[1], lines[0], *lines[2:]]),
        CHAIN,
        "line 1 does not follow",
    ),
    "a chain without its end": (lambda run: edit_lines(run, lambda lines: lines[:-1]), CHAIN, "the chain does not have it"),
    "an edited plan": (lambda run: edit_plan(run, edit("reference", {})), CHAIN, "run.json is not the plan"),
    "another cell in the plan": (
        lambda run: edit_plan(run, edit("cells.0.cell.seed", 7)),
        "cells of records are those of the plan",
        "its cell is not that of the plan",
    ),
    "an edited table": (
        lambda run: edit_text(run, "table.csv", r",ok,", ",oom,"),
        TABLES,
        "table.csv: status of launch 1",
    ),
    "a row that is gone": (drop_a_row, TABLES, "table.parquet: no row of launch 1"),
    "an edited ratio": (lambda run: edit_text(run, "report.md", r"\| [0-9.]+x \\~ \|", r"| 9.99x |"), REPORT, "is 9.99x"),
    "an edited verdict": (
        lambda run: edit_text(run, "report.md", r"(\| [0-9.]+x) \\~ \|", r"\1 |"),
        REPORT,
        "row 2: vs reference is ",
    ),
    "an edited throughput": (
        lambda run: edit_text(run, "report.md", r"\| (ok[^|]*) \| [0-9.]+ \|", r"| \1 | 999 |"),
        REPORT,
        "row 1: samples/s is 999",
    ),
    "two launches at once": (
        lambda run: edit_record(run, edit("duration_s", 1e5)),
        "launches ran one after another",
        "it started",
    ),
    "other work in one launch": (
        lambda run: edit_record(run, double_all_flops, launch=2),
        "launches of a cell have the same shards, sizes and FLOPs",
        "FLOPs is",
    ),
}


@pytest.mark.parametrize("corruption", RUN_CORRUPTIONS)
def test_a_corrupt_run_is_rejected_for_its_own_reason(run, corruption):
    corrupt, sentence, fragment = RUN_CORRUPTIONS[corruption]
    corrupt(run)
    messages = [
        violation.message for violation in verify_run(run, REPORT_INVARIANTS).violations if violation.sentence == sentence
    ]
    assert any(fragment in message for message in messages), messages


def test_launches_on_a_dataset_with_other_metadata_may_differ_in_their_work(run):
    def on_other_data(record):
        double_all_flops(record)
        edit("environment.data_sha256", "f" * 64)(record)

    edit_record(run, on_other_data, launch=2)
    sentences = {violation.sentence for violation in verify_run(run, REPORT_INVARIANTS).violations}
    assert "launches of a cell have the same shards, sizes and FLOPs" not in sentences


def test_a_chain_made_anew_is_not_the_one_whose_head_was_printed(run):
    head = run.chain.head()
    assert benchbox("verify", run.path, "--head", head).returncode == EXIT_OK
    edit_record(run, edit("started_at", lambda text: text))  # the same content is no edit
    assert verify_run(run, REPORT_INVARIANTS).violations == ()
    record = json.loads(path_of(run).read_text())
    shutil.rmtree(path_of(run).with_suffix(""))
    for name in ("table.csv", "table.parquet", "report.md", "chain.jsonl"):
        (run.path / name).unlink()
    scale_times(record, 0.5)
    records = [*run.records()]
    run.write_run(run.run())
    for unchanged in records:
        is_forged = (unchanged["cell_id"], unchanged["launch"]) == (record["cell_id"], record["launch"])
        run.write_record(record if is_forged else unchanged)
    assert benchbox("verify", run.path).returncode == EXIT_OK  # the chain has no key: nothing is left that contradicts it
    refused = benchbox("verify", run.path, "--head", head)
    assert refused.returncode == EXIT_THRESHOLD
    assert "the chain was made anew after that head was printed" in refused.stderr


def test_a_published_run_takes_its_chain_along(run, tmp_path):
    assert benchbox("report", run.path, "--out", tmp_path / "published", "--pack").returncode == EXIT_OK
    shown = benchbox("verify", tmp_path / "published")
    assert shown.returncode == EXIT_OK
    assert f"head {run.chain.head()}" in shown.stdout
    assert run.chain.head() in (tmp_path / "published" / "report.md").read_text()


@pytest.mark.parametrize(
    ("continued", "violation"),
    [(False, "chain.jsonl: missing"), (True, "not measured by this run: the chain does not have it")],
)
def test_records_are_not_taken_for_measured_ones_when_their_chain_was_removed_or_begun_anew(run, continued, violation):
    run.chain.path.unlink()
    if continued:
        run.write_run(run.run())
    refused = benchbox("verify", run.path)
    assert refused.returncode == EXIT_THRESHOLD
    assert violation in refused.stdout.replace("\n", " ")


def test_tables_from_before_a_plan_with_further_cells_are_not_of_it(run):
    """The command with the further cells was stopped before its first launch."""
    plan = run.run()
    cell = replace(Cell.from_dict(dict(next(iter(plan.cells.values())))), batch=64)
    later = time.time() + 10
    run.write_run(replace(plan, cells={**plan.cells, cell.cell_id: cell.to_dict()}))
    os.utime(run.path / "run.json", (later, later))
    assert [str(violation) for violation in verify_run(run, REPORT_INVARIANTS).violations] == []
