"""The extension DeepSpeed compiles on CPU survives a build that was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.environment import host_variables
from benchbox.spec.cell import MeasureSpec
from tests.support.ranks import tiny_cell


@pytest.mark.ranks
def test_a_lock_left_by_a_killed_build_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits for ever for a build whose process is gone; ours does not, and the cell runs."""
    built = Path(host_variables(os.environ)["TORCH_EXTENSIONS_DIR"])
    folder = tmp_path / "extensions"
    if built.is_dir():
        shutil.copytree(built, folder)  # what is built already need not be compiled again
    stale = folder / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    measure = MeasureSpec(warmup_steps=1, steps=1, launches=1, timeout_s=240.0)
    record = launch_cell(tiny_cell(backend="zero1"), measure, launch=1, folder=tmp_path / "launch", launcher=TorchrunLauncher())
    assert record["status"] == "ok", record["error"]
    assert not stale.exists()
