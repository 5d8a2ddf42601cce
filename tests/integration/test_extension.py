"""The extension DeepSpeed compiles on CPU: a stage of its own or a task for doctor; it survives a build that was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchbox.backends.extension import extension_file
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.environment import host_variables
from benchbox.spec.cell import MeasureSpec
from benchbox.store.events import read_events
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


@pytest.mark.ranks
def test_compiling_is_a_stage_of_the_launch_that_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linking is all that is left to do here, so that the test does not take as long as compiling does."""
    shared_object = _linkable_extension(tmp_path / "extensions")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    measure = MeasureSpec(warmup_steps=1, steps=1, launches=1, timeout_s=240.0)
    folder = tmp_path / "launch"
    record = launch_cell(tiny_cell(backend="zero1"), measure, launch=1, folder=folder, launcher=TorchrunLauncher())
    assert record["status"] == "ok", record["error"]
    assert shared_object.exists()
    events = [read_events(folder / f"events-rank{rank}.jsonl", 0)[0] for rank in range(2)]
    stages = [[event["stage"] for event in rank_events if event["event"] == "progress"][:4] for rank_events in events]
    assert ["build", "prepare", "compile_extension", "prepare"] in stages, "the other rank may come when all is compiled"


def test_doctor_compiles_the_extension_beforehand(tmp_path: Path) -> None:
    shared_object = _linkable_extension(tmp_path)
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    doctor = [sys.executable, "-m", "benchbox.cli.app", "doctor"]
    before, compiled = (
        subprocess.run([*doctor, *options], env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
        for options in ([], ["--compile"])
    )
    assert "warn     extension      not compiled" in before
    assert compiled.startswith("compiling DeepSpeed's CPU extension, once per environment\n")
    assert f"ok       extension      {shared_object}\n" in compiled


def _linkable_extension(folder: Path) -> Path:
    """Copy what is compiled in this environment, without the shared object. Return the path of the shared object."""
    built = Path(host_variables(os.environ)["TORCH_EXTENSIONS_DIR"])
    if built.is_dir():
        shutil.copytree(built, folder, dirs_exist_ok=True)
    shared_object = extension_file(folder)
    shared_object.unlink(missing_ok=True)
    return shared_object
