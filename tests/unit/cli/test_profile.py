"""Cells that `benchbox profile` refuses before it starts ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.cli.profile import profile
from benchbox.errors import ConfigurationError

MATRIX = Path(__file__).parents[3] / "matrices" / "backends.yaml"


def test_a_cell_whose_steps_differ_in_shape_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="profile the cell with padding: full"):
        profile(MATRIX, sets=["padding=longest"], only=["backend=ddp"], policy_dirs=[], out=tmp_path / "out")
