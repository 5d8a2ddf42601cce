"""The cell that `benchbox train --from RUN --cell ID` names."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchbox.cli.measured_cell import find_measured_cell
from benchbox.errors import ConfigurationError
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.example_run import CELL, OOM, example_record, example_run

CELLS = [replace(CELL, seed=seed) for seed in range(40)]  # so many that several ids begin with the same digit


@pytest.fixture
def run(tmp_path):
    """A run in which the first cell failed once and then ended ok, the second always failed, and the others have not run."""
    store = RunStore(tmp_path)
    store.write_run(example_run(CELLS))
    store.write_record(example_record(CELLS[0], 1, status="oom", error=OOM))
    store.write_record(example_record(CELLS[0], 2))
    for launch, status in ((1, "oom"), (2, "crash"), (3, "oom")):
        store.write_record(example_record(CELLS[1], launch, status=status, error=OOM))
    return tmp_path


def test_the_beginning_of_an_id_names_the_cell_as_it_was_measured(run):
    setup = find_measured_cell(run, CELLS[0].cell_id[:10])
    assert (setup.cell, setup.label) == (CELLS[0], f"cell {CELLS[0].cell_id} of {run}")


def test_a_cell_without_a_launch_that_ended_ok_is_refused_with_what_became_of_it(run):
    for cell, outcome in ((CELLS[1], "oom, crash"), (CELLS[2], "not run")):
        message = f"no launch of cell {cell.cell_id} in .* ended ok \\({outcome}\\); choose a cell that was measured"
        with pytest.raises(ConfigurationError, match=message):
            find_measured_cell(run, cell.cell_id)


def test_a_beginning_of_several_ids_or_of_none_is_refused(run):
    ((shared, _),) = Counter(cell.cell_id[0] for cell in CELLS).most_common(1)
    alike = [cell.cell_id for cell in CELLS if cell.cell_id.startswith(shared)]
    with pytest.raises(ConfigurationError, match=f"{len(alike)} cells of .* begin so: {', '.join(alike)}; add digits"):
        find_measured_cell(run, shared)
    mistyped = f"{CELLS[0].cell_id[:-1]}x"
    with pytest.raises(ConfigurationError, match=f"has no such cell; did you mean '{CELLS[0].cell_id}'"):
        find_measured_cell(run, mistyped)


def test_a_training_without_a_file_asks_for_its_length(tmp_path):
    cell, store = replace(CELL, policy="pi0"), RunStore(tmp_path)
    store.write_run(example_run([cell]))
    store.write_record(example_record(cell))
    refused = run_in_process("train", "--from", tmp_path, "--cell", cell.cell_id)
    assert (refused.returncode, refused.stderr) == (2, "error: a training without a file needs its length: --steps N\n")


def test_a_cell_of_a_newer_benchbox_is_refused_in_one_line(tmp_path):
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    record = example_record()
    store.write_record({**record, "config": {**record["config"], "added_later": 1}})
    refused = run_in_process("train", "--from", tmp_path, "--cell", CELL.cell_id, "--steps", "1")
    message = (
        "a cell has the field 'added_later', which this benchbox does not know: written by a newer benchbox; upgrade this one"
    )
    assert (refused.returncode, refused.stderr) == (2, f"error: {message}\n")
