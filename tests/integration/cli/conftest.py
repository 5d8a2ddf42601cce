from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.commands import run_in_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def benchbox(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in an empty directory, in the process of the test, with its output not on a terminal."""

    def run(*arguments: str | Path, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return run_in_process(*arguments, cwd=cwd, variables={"OMP_NUM_THREADS": "1", "COLUMNS": "80"})

    return run
