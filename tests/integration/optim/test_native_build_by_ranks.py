"""Ranks of a training start at the same time, and each needs the compiled functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.native_pairs import needs_compiler
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@needs_compiler
def test_ranks_that_compile_at_the_same_time_all_get_it(tmp_path: Path) -> None:
    run_ranks(2, Path(__file__).with_name("compiles_native.py"), str(tmp_path))
    assert len(list((tmp_path / "benchbox" / "native").iterdir())) == 1
