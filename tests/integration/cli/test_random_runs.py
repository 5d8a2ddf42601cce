"""Random run directories: every command reads the same figures of them, and no verdict contradicts the truth."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.analysis.answers import answers
from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.changes import compare_runs
from benchbox.analysis.figures import figures_of_run
from benchbox.analysis.inference import RELEVANT
from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import summarize
from benchbox.api.results import Results
from benchbox.errors import EXIT_OK, EXIT_THRESHOLD
from tests.support.commands import run_in_process
from tests.support.random_runs import DAY, RandomRun, write_random_run
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.analysis.summary import CellSummary

OPPOSITE = {"improvement": "regression", "regression": "improvement"}
LATER = DAY + timedelta(days=5000)


def seeds(default: range, stop: int) -> list[Any]:
    return in_tiers(range(stop), lambda seed: seed in default)


def verdicts(made: RandomRun, records: list[Any], cells: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the verdicts of a run on its pairs, and on the set-ups of its tasks."""
    run = replace(made.run, cells=cells or made.run.cells)
    summaries = summarize(run, records)
    pairs = compare_run(run, summaries, []).cells
    found = {cell_id: (pair.verdict, pair.reason) for cell_id, pair in pairs.items()}
    for answer in answers(summaries, compared=tuple(pairs.values())):
        fastest = answer.fastest.cell_id if answer.fastest else None
        rivals = sorted((rival.summary.cell_id, rival.verdict) for rival in answer.rivals)
        found[json.dumps(answer.task, sort_keys=True)] = (fastest, rivals)
    return found


def speeds(summaries: list[CellSummary]) -> dict[str, Any]:
    return {summary.cell_id: summary.values["global_samples_per_s"] for summary in summaries}


@pytest.mark.parametrize("seed", seeds(range(4), 60))
def test_verdicts_follow_from_the_times_alone_and_contradict_no_truth(tmp_path: Path, seed: int) -> None:
    """Neither the unit of time, nor the order of cells and launches, nor a failed launch changes one."""
    made, slower = (write_random_run(tmp_path / name, seed, factor=factor) for name, factor in (("a", 1.0), ("b", 2.0)))
    records = list(made.store.records())
    expected = verdicts(made, records)
    assert verdicts(slower, list(slower.store.records())) == expected
    shuffled, ids = list(records), list(made.run.cells)
    random.Random(seed).shuffle(shuffled)
    random.Random(seed).shuffle(ids)
    assert verdicts(made, shuffled, {cell_id: made.run.cells[cell_id] for cell_id in ids}) == expected
    rates = {cell_id: samples(made.run.cells[cell_id]) / step_s for cell_id, step_s in made.step_s.items()}
    summaries = summarize(made.run, records)
    for cell_id, pair in compare_run(made.run, summaries, []).cells.items():
        if pair.is_settled and pair.reference is not None:
            truth = rates[cell_id] / rates[pair.reference.cell_id]
            within = abs(math.log(truth)) <= math.log(1 + 1.1 * RELEVANT)
            assert pair.verdict == "neutral" if within else pair.verdict == ("improvement" if truth > 1 else "regression")
    crash = {"type": "RuntimeError", "message": "", "rank": 0, "phase": None, "traceback": None}
    for record in records[-1:]:
        failed = record | {"launch": record["launch"] + 1, "status": "crash", "error": crash, "throughput": None}
        assert speeds(summarize(made.run, [*records, failed])) == speeds(summaries)


def samples(cell: Any) -> int:
    return int(cell["batch"] * cell["accumulation"] * cell["world_size"])


@pytest.mark.parametrize("seed", seeds(range(4), 60))
def test_a_comparison_is_the_mirror_of_its_reverse(tmp_path: Path, seed: int) -> None:
    factor = random.Random(seed).choice((1.0, 1.03, 1.2))
    sides = []
    for name, start, slowdown in (("a", DAY, 1.0), ("b", LATER, factor)):
        made = write_random_run(tmp_path / name, seed, factor=slowdown, start=start)
        sides.append(figures_of_run(name, made.run, list(made.store.records())))
    forth = {(change.cell_id, change.metric): change for change in compare_runs(*sides).changes}
    back = {(change.cell_id, change.metric): change for change in compare_runs(*reversed(sides)).changes}
    assert forth.keys() == back.keys()
    for key, change in forth.items():
        assert back[key].verdict == OPPOSITE.get(change.verdict, change.verdict), key
        assert (back[key].base, back[key].head) == (change.head, change.base)
        if change.ratio is not None:
            assert back[key].ratio == pytest.approx(1 / change.ratio)


@pytest.mark.parametrize("seed", seeds(range(1, 3), 24))
def test_every_command_reads_the_same_figures_and_no_text_of_a_run_is_taken_for_more(tmp_path: Path, seed: int) -> None:
    made = write_random_run(tmp_path / "a", seed)
    later = write_random_run(tmp_path / "b", seed, start=LATER)
    site, page = tmp_path / "site", tmp_path / "compared.html"
    pair = (made.store.path, later.store.path)
    results = [
        run_in_process("report", made.store.path),
        run_in_process("report", made.store.path, "--summary"),
        run_in_process("compare", *pair),
        run_in_process("compare", *pair, "--format", "github"),
        run_in_process("compare", *pair, "--format", "markdown"),
        run_in_process("compare", *pair, "--format", "html", "--out", page),
        run_in_process("check", made.store.path, "--baseline", tmp_path),
        run_in_process("check", made.store.path, "--baseline", tmp_path, "--format", "github"),
        run_in_process("site", *pair, "--out", site),
    ]
    for result in results:
        assert result.returncode in (EXIT_OK, EXIT_THRESHOLD), result.stderr
        assert all(line.startswith(("error: ", "note: ", "inconclusive: ")) for line in result.stderr.splitlines()), (
            result.stderr
        )
        assert result.stderr.count("error: ") == (result.returncode != EXIT_OK), result.stderr
        assert (result.stdout + result.stderr).replace("\n", "").isprintable(), result.args
        assert "\n::error file=x" not in result.stdout
    for file in (made.store.path / "report.html", page, *site.rglob("*.html")):
        assert "<script>alert" not in file.read_text()
        assert "<img src=x" not in file.read_text()
    verified = run_in_process("verify", made.store.path)
    assert verified.returncode == EXIT_OK, verified.stdout
    results_api = Results(made.store.path)
    cells, table = results_api.cells, results_api.report.table
    column = [column.name for column in table.columns].index("samples/s")
    compared = json.loads(run_in_process("compare", *pair, "--format", "json").stdout)["changes"]
    bases = {change["cell_id"]: change["base"] for change in compared if change["metric"] == "global_samples_per_s"}
    for row, cell_id in zip(table.rows, made.run.cells, strict=True):
        measured = [record for record in made.records if record["cell_id"] == cell_id and record["status"] == "ok"]
        rate = median(record["throughput"]["global_samples_per_s"] for record in measured) if measured else None
        assert row[column].text == quantity(rate, "").strip()
        value = cells.loc[cell_id, "global_samples_per_s"]
        assert (value == rate) if rate is not None else math.isnan(value)
        assert bases.get(cell_id, rate) == rate
