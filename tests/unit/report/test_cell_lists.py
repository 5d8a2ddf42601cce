"""Short texts for lists of cells: they select the same cells when read back."""

from __future__ import annotations

import json
import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from benchbox.report.cell_lists import CellLists

AXES = ("backend", "cams", "seed")
CELLS = [
    {"backend": backend, "cams": cams, "seed": seed}
    for backend, cams, seed in product(("single", "ddp", "zero2", "zero3"), (1, 4), (0, 1, 2))
]
LISTS = CellLists(CELLS, AXES)

WORD = r'(?:"(?:[^"\\]|\\.)*"|[\w.:/+-]+)'
CONDITION = re.compile(rf"(\w+)(=|!=| in | not in )({WORD}|\[{WORD}(?:, {WORD})*\])")
CLAUSE = re.compile(rf"{CONDITION.pattern}(?:, {CONDITION.pattern})*")


def positions_of(text, cells):
    """Read a text back: the positions of the cells that it selects."""
    if text in (f"all {len(cells)} cells", "the only cell"):
        return set(range(len(cells)))
    text, count = re.fullmatch(r"(.*) \((\d+) of \d+ cells\)", text, re.DOTALL).groups()
    is_complement = text.startswith("all but ")
    selected, text = set(), text.removeprefix("all but ")
    while text:
        clause = CLAUSE.match(text).group()
        conditions = [match.groups() for match in CONDITION.finditer(clause)]
        selected |= {position for position, cell in enumerate(cells) if all(holds(cell, *part) for part in conditions)}
        text = text[len(clause) :].removeprefix("; ")
    selected = set(range(len(cells))) - selected if is_complement else selected
    assert len(selected) == int(count)
    return selected


def holds(cell, axis, relation, values):
    words = [json.loads(word) if word.startswith('"') else word for word in re.findall(WORD, values)]
    return (str(cell[axis]) in words) == (relation in ("=", " in "))


@given(st.sets(st.integers(0, len(CELLS) - 1), min_size=1))
def test_a_text_selects_the_cells_that_it_was_made_of(positions):
    assert positions_of(LISTS.text(positions), CELLS) == positions


@given(st.data())
def test_values_of_any_characters_can_be_read_back(data):
    values = data.draw(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=5, unique=True))
    cells = [{"policy": value} for value in values]
    positions = data.draw(st.sets(st.integers(0, len(cells) - 1), min_size=1))
    assert positions_of(CellLists(cells, ["policy"]).text(positions), cells) == positions


def test_a_list_is_as_short_as_what_the_cells_have_in_common():
    def text(condition):
        return LISTS.text([position for position, cell in enumerate(CELLS) if condition(cell)])

    assert text(lambda cell: True) == "all 24 cells"
    assert text(lambda cell: cell["backend"] == "zero2") == "backend=zero2 (6 of 24 cells)"
    assert text(lambda cell: cell["backend"] != "single") == "backend!=single (18 of 24 cells)"
    assert text(lambda cell: cell["backend"].startswith("zero") and cell["cams"] == 4) == (
        "backend in [zero2, zero3], cams=4 (6 of 24 cells)"
    )
    assert text(lambda cell: (cell["backend"], cell["cams"]) != ("single", 4)) == (
        "all but backend=single, cams=4 (21 of 24 cells)"
    )


def test_the_cells_of_a_run_need_not_be_a_product():
    cells = [{"backend": "ddp", "cams": 1}, {"backend": "ddp", "cams": 4}, {"backend": "zero2", "cams": 1}]
    lists = CellLists(cells, ["backend", "cams"])
    assert lists.text([0, 2]) == "cams=1 (2 of 3 cells)"
    assert lists.text([2]) == "backend=zero2 (1 of 3 cells)"
    assert CellLists(cells[:1], ["backend"]).text([0]) == "the only cell"
