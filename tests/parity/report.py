"""The published table of parity, as Markdown."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from itertools import groupby
from typing import TYPE_CHECKING

from tests.parity.lerobot import ENVIRONMENT, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.parity.table import ParityRow

_INTRODUCTION = """# Parity with the peers' own code

`make parity` wrote this table with {own}.
In its environment {peer} has {theirs}; its other packages
are in `tests/parity/requirements/lerobot.txt`. {python}
Where no package exists, the peer is a module of `tests/reference`, written from papers and documented facts.

Both sides have the same weights, batch, noise and time, in float32 on a CPU, at tiny sizes. *difference* is the largest
difference of any element, divided by the largest magnitude of the peer's values, and *bound* what the test allows. Nothing here
was run on a GPU or with published weights, which no test downloads: exported and trained checkpoints are tiny too.
"""
_LOWERED = (
    "It asks for Python 3.12, which its sources need\n"
    "for type parameters alone; these were rewritten (`tests/parity/type_parameters.py`)."
)
_WANTED = """
## Wanted differences

They must exist: a test fails if one has gone. Reasons in full are in the docstrings of the policies.
"""


def render_report(rows: Sequence[ParityRow]) -> str:
    """Return the table of all comparisons, one row for each policy, peer and quantity."""
    own = f"Python {platform.python_version()}, torch {version('torch')} and transformers {version('transformers')}"
    pins = [pin.replace("==", " ") for pin in ENVIRONMENT.pinned_packages]
    theirs = next(pin for pin in pins if pin.startswith("transformers "))
    lowered = _LOWERED if sys.version_info < (3, 12) else ""
    introduction = _INTRODUCTION.format(
        own=own, peer=VERSION, theirs=f"this torch (it asks for 2.7 to 2.11) and {theirs}", python=lowered
    )
    equal = ["| policy | peer | quantity | difference | bound |", "|---|---|---|---|---|"]
    wanted = ["| policy | peer | quantity | difference | reason |", "|---|---|---|---|---|"]
    for (policy, peer), group in groupby(sorted(rows, key=_key), key=_key):
        for row in group:
            cells = policy, peer, row.quantity, _format(row.difference)
            if row.reason:
                wanted.append(_line(*cells, row.reason))
            else:
                equal.append(_line(*cells, _format(row.bound)))
    parts = [introduction, *equal]
    if len(wanted) > 2:
        parts += [_WANTED, *wanted]
    return "\n".join(parts) + "\n"


def _key(row: ParityRow) -> tuple[str, str]:
    return row.policy, row.peer


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _format(number: float) -> str:
    """Return one digit: more would differ between machines."""
    return "0" if number == 0 else f"{number:.0e}"
