"""Cards of cells: everything about a cell, and the command that runs it again."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from benchbox.analysis.summary import varying_fields
from benchbox.cli.matrix_run import build_run
from benchbox.plan import plan
from benchbox.plan.only import select
from benchbox.report.cards import run_command
from benchbox.report.view import build_report
from benchbox.spec import load_matrix, parse_overrides
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, OOM, example_record, example_run
from tests.support.large_runs import PUBLISHED


def test_the_command_of_a_cell_selects_that_cell_of_its_matrix():
    run = RunStore(PUBLISHED).run()
    cells = plan(load_matrix(Path(run.matrix_file), {}, [])).cells
    axes = varying_fields([*run.cells.values()])
    for cell in [*run.cells.values()][::40]:
        words = shlex.split(run_command(run, cell, axes))
        assert words[:4] == ["benchbox", "run", run.matrix_file, "--only"]
        (selected,) = select(words[4], cells)
        assert {axis: getattr(selected, axis) for axis in axes} == {axis: cell[axis] for axis in axes}


def test_the_command_of_a_cell_has_the_options_that_decide_what_the_cell_is():
    loaded = load_matrix(
        PUBLISHED.parents[1] / "matrices/backends.yaml", parse_overrides(["size=small", "batch=1, seed=3"]), []
    )
    run = build_run(
        loaded,
        plan(loaded),
        matrix_file="matrices/backends.yaml",
        sets=["size=small", "batch=1, seed=3"],
        policy_dirs=[Path("my own")],
    )
    card, *_ = build_report(run, []).cards
    words = shlex.split(card.command)
    assert words[:3] == ["benchbox", "run", "matrices/backends.yaml"]
    assert words[-6:] == ["--set", "size=small", "--set", "batch=1, seed=3", "--policy-dir", "my own"]


def test_the_command_of_a_batch_of_a_walk_selects_the_walk_which_chooses_its_batches():
    cells = [replace(CELL, backend=backend, batch=batch) for backend in ("ddp", "zero2") for batch in (2, 4)]
    ids = [cell.cell_id for cell in cells]
    rest = {"at_most": None, "predicted_batch": None, "prediction_reason": None, "fastest": None}
    run = example_run(cells, walks=[{"cells": ids[:2], **rest}, {"cells": ids[2:], **rest}])
    commands = [card.command for card in build_report(run, [example_record(cell) for cell in cells]).cards]
    assert commands == [f"benchbox run matrices/example.yaml --only backend={cell.backend}" for cell in cells]


def test_the_command_of_a_run_in_a_directory_of_its_own_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_matrix(PUBLISHED.parents[1] / "matrices/backends.yaml", {}, [])

    def words(out):
        run = build_run(loaded, plan(loaded), matrix_file="backends", sets=["batch=1"], policy_dirs=[], out=out)
        return shlex.split(build_report(run, []).cards[0].command)

    assert words(Path("my runs/b"))[-4:] == ["--set", "batch=1", "--out", "my runs/b"]
    for default in (None, Path("runs") / loaded.name, tmp_path / "runs" / loaded.name):
        assert words(default)[-2:] == ["--set", "batch=1"]


def test_the_command_of_a_cell_quotes_values_that_are_no_plain_text():
    values = ["pi05", "/data/it's, #2", "007", "null", "a: b", "bf16_master", ""]
    cells = [replace(CELL, policy=value, weights=None) for value in values]
    run = example_run(cells)
    for cell in cells:
        words = shlex.split(run_command(run, cell.to_dict(), ["policy", "weights", "checkpointing"]))
        assert select(words[4], cells) == [cell]
    assert run_command(run, cells[0].to_dict(), ["policy"]).endswith("--only policy=pi05")


def test_a_card_has_all_that_is_known_about_its_cell_and_an_axis_only_in_its_title():
    """The second launch of the cell ran out of memory: its figures and ranks are those of the first."""
    failed = replace(CELL, backend="zero2")
    second = example_record(failed, 2, status="oom", error=OOM)
    cards = build_report(example_run([CELL, failed]), [example_record(CELL), example_record(failed), second]).cards
    assert [card.title for card in cards] == ["backend=ddp", "backend=zero2"]
    assert [card.command for card in cards] == [f"benchbox run matrices/example.yaml --only {card.title}" for card in cards]
    rows = {group.title: group.rows for group in cards[1].groups}
    assert list(rows) == [
        "Measured",
        "Observed beside requested",
        "Phases of a mean step, slowest rank",
        "Ranks of launch 1",
        "Census, all ranks",
        "Launches",
        "Configuration",
    ]
    assert rows["Measured"][:2] == (("status", "oom (1/2 ok)", "1 of 2 launches ok"), ("samples/s", "18.4", "one launch"))
    observed = {row[0]: row[1:] for row in rows["Observed beside requested"]}
    assert observed["attention"] == ("sdpa:flash_cpu", "asked: sdpa")
    assert observed["device"] == ("cpu", "")
    assert rows["Phases of a mean step, slowest rank"][1] == ("forward", "68.5 ms", "")
    assert rows["Ranks of launch 1"] == (
        ("rank 0", "step 207 ms, peak allocated 150 MiB", ""),
        ("rank 1", "step 217 ms, peak allocated 160 MiB", ""),
    )
    assert rows["Census, all ranks"][:2] == (
        ("parameter", "bfloat16 on cpu: 4,002 elements", "7.82 KiB"),
        ("master", "float32 on cpu: 2,001 elements", "7.82 KiB"),
    )
    folder = f"cells/{failed.cell_id}"
    assert rows["Launches"] == (
        ("launch 1", "ok", f"{folder}/launch-1.json"),
        ("launch 2", f"oom\n{OOM['type']}: {OOM['message']}\n{OOM['traceback']}", f"{folder}/launch-2.json"),
    )
    configuration = {name: text for name, text, _ in rows["Configuration"]}
    assert (configuration["backend"], configuration["optim.lr"]) == ("zero2", "2.5e-05")
    assert "-" not in configuration.values(), "what is not set is left out"


def test_a_card_of_a_cell_that_has_not_run_has_its_status_and_its_configuration():
    (card,) = build_report(example_run([CELL]), []).cards
    assert card.command == "benchbox run matrices/example.yaml"
    assert [group.title for group in card.groups] == ["Measured", "Configuration"]
