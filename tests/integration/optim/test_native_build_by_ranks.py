"""Ranks of a training start at the same time, and each needs the compiled functions."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.native_pairs import needs_compiler

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


@needs_compiler
def test_ranks_that_compile_at_the_same_time_all_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = "from benchbox.optim.native import library; assert library() is not None"
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 0]
    assert len(list((tmp_path / "benchbox" / "native").iterdir())) == 1
