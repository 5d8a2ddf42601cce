from __future__ import annotations

import itertools

import pytest

from benchbox.errors import ConfigurationError
from benchbox.plan import join_expressions, select
from benchbox.spec.cell import Cell

CELLS = [
    Cell(policy="alpha", size="tiny", backend=backend, world_size=2, batch=1, cams=cams, checkpointing=checkpointing)
    for backend, cams, checkpointing in itertools.product(["zero2", "ddp", "fsdp2"], [1, 4], [False, True])
]


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("", lambda cell: True),
        ("backend=zero2", lambda cell: cell.backend == "zero2"),
        ("backend=zero2,cams=4", lambda cell: cell.backend == "zero2" and cell.cams == 4),
        ("cams != 4", lambda cell: cell.cams == 1),
        ("backend in [zero2, ddp]", lambda cell: cell.backend in {"zero2", "ddp"}),
        ("backend not in [zero2,ddp], checkpointing=true", lambda cell: cell.backend == "fsdp2" and cell.checkpointing),
        ("checkpointing=yes, cams=1", lambda cell: cell.checkpointing and cell.cams == 1),
        ("checkpointing in [no]", lambda cell: not cell.checkpointing),
        ("weights=null, cams=1", lambda cell: cell.cams == 1),
        ("backend in ['ddp']", lambda cell: cell.backend == "ddp"),
    ],
)
def test_an_expression_selects_the_cells_of_which_every_condition_holds(expression, holds):
    chosen = select(expression, CELLS)
    assert chosen == [cell for cell in CELLS if holds(cell)]
    assert chosen


@pytest.mark.parametrize(
    ("expression", "line"),
    [
        ("bckend=zero2", "--only bckend=zero2: unknown field 'bckend'; did you mean 'backend'?"),
        ("backend=zero3", "--only backend=zero3: no cell has backend zero3; there is zero2, ddp, fsdp2"),
        ("backend not in [zero3]", "--only backend not in [zero3]: no cell has backend zero3; there is zero2, ddp, fsdp2"),
        ("cams=true", "--only cams=true: no cell has cams true; there is 1, 4"),
        ("weights=x", "--only weights=x: no cell has weights x; there is null"),
        ("checkpointing=1", "--only checkpointing=1: no cell has checkpointing 1; there is false, true"),
        ("zero2", "--only zero2: is not a condition; write it as backend=zero2 or backend in [zero2, ddp]"),
        (",", "--only ,: is not a condition; write it as backend=zero2 or backend in [zero2, ddp]"),
        ("cams in 4", "--only cams in 4: is not a condition; after 'in' comes a list: [a, b]"),
        ("cams=[1, 4]", "--only cams=[1, 4]: is not a condition; write it as cams in [...]"),
        ("cams=[", "--only cams=[: not YAML: expected the node content, but found '<stream end>'"),
        ("backend=ddp,backend=zero2", "--only backend=ddp,backend=zero2: selects none of the 12 cells"),
        ("__class__=x", "--only __class__=x: unknown field '__class__'; one of "),
    ],
)
def test_an_expression_that_can_only_be_a_slip_is_refused(expression, line):
    with pytest.raises(ConfigurationError) as caught:
        select(expression, CELLS)
    assert str(caught.value).splitlines()[0].startswith(line)


def test_every_slip_of_an_expression_is_reported():
    with pytest.raises(ConfigurationError) as caught:
        select("cams=7,what,backend=zero2,seed in 3", CELLS)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("expressions", [["backend=ddp", "cams=4"], ["", "backend=ddp", " ", "cams=4"], ["backend=ddp,cams=4"]])
def test_the_conditions_of_several_expressions_must_all_hold(expressions):
    assert select(join_expressions(expressions), CELLS) == [cell for cell in CELLS if (cell.backend, cell.cams) == ("ddp", 4)]


def test_no_expression_selects_every_cell():
    assert select(join_expressions([]), CELLS) == CELLS
