"""`verify` compares the tables of report.md with those that the records give."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace

import pytest

from benchbox.analysis.invariants import verify_run
from benchbox.errors import RecordError
from benchbox.launch.fingerprint import report_sha256
from benchbox.report.markdown import render_markdown
from benchbox.report.printed_tables import REPORT_INVARIANTS
from benchbox.report.write import read_report
from benchbox.store.predictions import write_predictions
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, MEASURE, MIB, example_record, example_run, write_example
from tests.support.walks import START, Machine

SENTENCE = "tables of the report follow from the records"
BACKENDS = (replace(START, backend="fsdp1_full"), replace(START, backend="zero2"))
PREDICTION = {
    **dict.fromkeys(("peak_bytes", "resident_bytes", "logits_bytes", "model_flops", "recomputed_flops"), 1),
    "optimizer_bytes": 1,
    "total_numel": 1,
    "world_size": 2,
    "moment": "forward",
    "notes": [],
    "components": {},
    "collectives": {"all_reduce": {"count": 1, "bytes": 1}},
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[RunStore, str]:
    """A run of two walks, FSDP to batch 6 and ZeRO-2 to batch 9, and its report."""
    measure = replace(MEASURE, memory_limit=200 * MIB, launches=8)
    largest = {"fsdp1_full": 6, "zero2": 9}
    machine = Machine(
        tmp_path_factory.mktemp("walks"), lambda cell: largest[cell.backend], BACKENDS, measure, predicted=5, fastest=7
    )
    machine.run()
    return machine.store, render_markdown(read_report(machine.store, machine.store.records()))


def problems(store: RunStore, text: str) -> list[str]:
    (store.path / "report.md").write_text(text)
    found = verify_run(store, REPORT_INVARIANTS).violations
    return [violation.message for violation in found if violation.sentence == SENTENCE]


def edited(text: str, old: str, new: str) -> str:
    assert re.search(old, text), old
    return re.sub(old, new, text, count=1)


def of_other_sources(text: str) -> str:
    return edited(text, report_sha256(), "0" * 64)


FIGURES = {  # edits of figures, which no sources change: pattern, replacement, message
    "the largest batch": (
        r"\| 6 \| 5 \| 160 MiB",
        "| 8 | 5 | 160 MiB",
        "Largest batches: row 1: largest batch that fits is 8, ",
    ),
    "the first batch that does not fit": (r"\| 7 \(rank", "| 9 (rank", "Largest batches: row 1: first that does not fit is 9"),
    "the fastest batch of a pair": (r"\| 6 \| 7 \| 0\.91x", "| 5 | 7 | 0.91x", "Largest batches: row 1: fastest batch is 5, "),
    "the batch of the reference": (
        r"\| 6 \| 7 \| 0\.91x",
        "| 6 | 6 | 0.91x",
        "row 1: of the reference is 6, the records give 7",
    ),
    "the ratio at the fastest batches": (r"\| 0\.91x", "| 1.91x", "row 1: samples/s over the reference's is 1.91x"),
    "the ratio of a cell": (r"\| 1\.00x", "| 1.90x", "Cells: row 1: vs reference is 1.90x"),
}
WORDS = {
    "the verdict at the fastest batches": (r"confidence: slower \|", "confidence: faster |", "row 1: evidence is 7 against 7"),
    "the confidence of a ratio": (r" \\~ \|", " |", "Cells: row "),
    "the throughput at a batch": (r"6: 15\.7", "6: 17.7", "row 1: samples/s by batch is 2: 12.3, 5: 15.4, 6: 17.7"),
    "the launches of a walk": (r"\| 4 \+ 7 \|", "| 4 + 9 |", "row 1: launches is 4 + 9, the records give 4 + 7"),
    "the status of a cell": (r"oom \(beyond memory\)", "ok", "status is ok, the records give oom (beyond memory)"),
}


def test_an_untouched_report_of_any_sources_violates_nothing(printed):
    store, text = printed
    assert problems(store, text) == []
    assert problems(store, of_other_sources(text)) == []
    assert problems(store, text.partition("\nRendered by")[0]) == [], "as older ones end"


@pytest.mark.parametrize("edit", [*FIGURES, *WORDS])
def test_an_edited_text_of_a_table_is_found(printed, edit):
    old, new, message = (FIGURES | WORDS)[edit]
    found = problems(printed[0], edited(printed[1], old, new))
    assert any(message in text for text in found), found


@pytest.mark.parametrize("edit", FIGURES)
def test_an_edited_figure_is_found_also_in_a_report_of_other_sources(printed, edit):
    old, new, message = FIGURES[edit]
    found = problems(printed[0], of_other_sources(edited(printed[1], old, new)))
    assert any(message.partition(" is ")[0] in text for text in found), found


@pytest.mark.parametrize("edit", WORDS)
def test_other_sources_may_have_judged_and_worded_otherwise(printed, edit):
    old, new, _ = WORDS[edit]
    assert problems(printed[0], of_other_sources(edited(printed[1], old, new))) == []


def test_other_sources_may_have_refused_a_ratio_at_the_fastest_batches(printed):
    store, text = printed
    refused = edited(text, r"\| 0\.91x \| .* \|", "| - | they also differ in torch |")
    assert problems(store, of_other_sources(refused)) == []
    assert problems(store, refused)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\| fsdp1\\_full \| 5 \|.*\n", "Cells: the number of rows is 11, the records give 12"),
        (r"\| backend=zero2 \|.*\n", "Largest batches: the number of rows is 1, the records give 2"),
    ],
)
def test_a_row_that_was_removed_is_found_in_a_report_of_any_sources(printed, pattern, message):
    store, text = printed
    for report in (text, of_other_sources(text)):
        assert [problem.removeprefix("report.md: ") for problem in problems(store, edited(report, pattern, ""))] == [message]


def test_a_section_that_was_removed_or_added_is_found(printed):
    store, text = printed
    before, section, after = text.partition("## Largest batches")
    without = before + after[after.index("## Cells") :]
    assert problems(store, without) == ["report.md: Largest batches: the number of tables is 0, the records give 2"]
    assert problems(store, of_other_sources(without)) == problems(store, without)
    assert problems(store, before + section + after.replace("## Method", "## Cells\n\n| a |\n|---|\n| 1 |\n\n## Method")) == [
        "report.md: Cells: the number of tables is 2, the records give 1"
    ]


def change_columns(text: str, section: str, change) -> str:
    """Return a report in which the texts of every line of the first table of a section are changed."""
    before, heading, after = text.partition(section)
    table = re.search(r"(^\|.*\|\n)+", after, re.MULTILINE)
    lines = [change(line.removeprefix("|").removesuffix("|").split("|")) for line in table[0].splitlines()]
    changed = "".join(f"|{'|'.join(texts)}|\n" for texts in lines)
    return before + heading + after[: table.start()] + changed + after[table.end() :]


def without(column: int):
    return lambda texts: texts[:column] + texts[column + 1 :]


COLUMNS = {  # edits of columns: section, change, message
    "a largest batch": ("## Largest batches", without(1), "Largest batches: column largest batch that fits is missing"),
    "set-ups": ("## Largest batches", without(0), "Largest batches: column set-up is missing"),
    "a ratio": ("## Cells", without(4), "Cells: column vs reference is missing"),
    "a second ratio": ("## Cells", lambda texts: [*texts, texts[4]], "Cells: column vs reference is added"),
    "ratios at the fastest batches": ("of the set-ups alone.", without(3), "column samples/s over the reference's is missing"),
}
OTHER_COLUMNS = {
    "a status": ("## Cells", without(2), "Cells: column status is missing"),
    "one of no records": (
        "## Cells",
        lambda texts: [*texts, texts[-1].replace("findings", "opinion")],
        "column opinion is added",
    ),
}


@pytest.mark.parametrize("edit", [*COLUMNS, *OTHER_COLUMNS])
def test_a_column_that_was_removed_or_added_is_found(printed, edit):
    section, change, message = (COLUMNS | OTHER_COLUMNS)[edit]
    (problem,) = problems(printed[0], change_columns(printed[1], section, change))
    assert message in problem


@pytest.mark.parametrize("edit", COLUMNS)
def test_a_column_of_figures_that_was_removed_or_added_is_found_also_in_a_report_of_other_sources(printed, edit):
    section, change, message = COLUMNS[edit]
    (problem,) = problems(printed[0], change_columns(of_other_sources(printed[1]), section, change))
    assert message in problem


@pytest.mark.parametrize("edit", OTHER_COLUMNS)
def test_other_sources_may_have_had_other_columns_of_words(printed, edit):
    section, change, _ = OTHER_COLUMNS[edit]
    assert problems(printed[0], change_columns(of_other_sources(printed[1]), section, change)) == []


@pytest.mark.parametrize(("pattern", "replacement", "texts"), [(r"fsdp1\\_full \| 5", "5", -1), (r" oom ", " oom | oom ", 1)])
def test_a_row_with_more_or_fewer_texts_than_columns_is_found_in_a_report_of_any_sources(printed, pattern, replacement, texts):
    store, text = printed
    section = text[text.index("## Cells") :]
    columns = re.search(r"^\| .*", section, re.MULTILINE)[0].count(" | ") + 1
    for report in (text, of_other_sources(text)):
        before, heading, after = report.partition("## Cells")
        (problem,) = problems(store, before + heading + edited(after, pattern, replacement))
        assert re.fullmatch(rf"report.md: Cells: row \d+ has {columns + texts} texts for {columns} columns", problem)


def test_a_table_that_was_removed_is_found_in_a_report_of_any_sources(printed):
    """The table of the fastest batches is the second one of its section."""
    store, text = printed
    for report in (text, of_other_sources(text)):
        removed = edited(report, r"\| set-up \| fastest batch (.*\n)*?\n", "\n")
        assert problems(store, removed) == ["report.md: Largest batches: the number of tables is 1, the records give 2"]


def test_texts_with_bars_and_backslashes_are_split_where_columns_end(tmp_path):
    cells = [replace(CELL, backend=backend, policy=name) for name in ("a | b", "c\\", "|") for backend in ("zero2", "ddp")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells, measure=asdict(MEASURE) | {"launches": 1}))
    for cell in cells:
        store.write_record(example_record(cell))
    assert problems(store, render_markdown(read_report(store, store.records()))) == []


def test_verifying_builds_no_other_part_of_a_report(printed, monkeypatch):
    """The other parts of 2,000 cells would take as long as reading all records once more."""
    for name in ("cell_cards", "answer_boxes", "requested_and_observed", "theory_section"):
        monkeypatch.setattr(f"benchbox.report.view.{name}", None)
    assert problems(*printed) == []


def test_a_report_from_before_a_record_is_not_compared_with_it(tmp_path):
    store = write_example(tmp_path)
    text = edited(render_markdown(read_report(store, store.records())), r"\| ok", "| oom")
    assert problems(store, text)
    later = (tmp_path / "report.md").stat().st_mtime + 10
    os.utime(store.record_path(*next(iter(store.stored_launches()))), (later, later))
    assert verify_run(store, REPORT_INVARIANTS).not_applicable[SENTENCE] == 1


def test_what_was_predicted_after_the_report_is_no_edit_of_it(tmp_path):
    store = write_example(tmp_path, failing=False)
    text = render_markdown(read_report(store, store.records()))
    for peak_bytes in (1, 2):
        write_predictions(store.path, dict.fromkeys(store.run().cells, PREDICTION | {"peak_bytes": peak_bytes}), {})
        later = render_markdown(read_report(store, store.records()))
        assert "predicted peak" in later
        assert problems(store, text) == []
        text = later


def test_a_folder_with_a_report_and_no_run_is_refused_in_one_line(tmp_path):
    for name in ("report.md", "table.csv"):
        (tmp_path / name).write_text("")
    with pytest.raises(RecordError, match="not a run directory"):
        verify_run(RunStore(tmp_path), REPORT_INVARIANTS)


def test_a_report_that_was_cut_to_what_github_shows_violates_nothing(tmp_path):
    names = [f"p{number:02}{'x' * 1500}" for number in range(30)]
    cells = [replace(CELL, backend=backend, policy=name) for name in names for backend in ("zero2", "ddp")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells, measure=asdict(MEASURE) | {"launches": 1}))
    for cell in cells:
        store.write_record(example_record(cell))
    text = render_markdown(read_report(store, store.records()))
    assert "more: report.html" in text
    assert problems(store, text) == []
    assert problems(store, of_other_sources(text)) == []
    assert any("Cells: row 1: status is oom" in problem for problem in problems(store, edited(text, r"\| ok", "| oom")))
