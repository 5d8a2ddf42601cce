"""The parity table that all comparisons write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.parity.table import ParityTable

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable


@pytest.fixture(scope="session")
def parity() -> ParityTable:
    """The table. Its rows are written to the file in the variable BENCHBOX_PARITY_ROWS, if there is one."""
    path = os.environ.get("BENCHBOX_PARITY_ROWS")
    return ParityTable(Path(path) if path else None)
