"""The extension DeepSpeed compiles on CPU: a stage of its own or a task for doctor; it survives a build that was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchbox.backends.extension import extension_file
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.environment import host_variables
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from benchbox.store.events import read_events
from tests.support.commands import run_in_process
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterator


MEASURE = MeasureSpec(warmup_steps=1, steps=1, launches=1, timeout_s=240.0)


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ForkServerLauncher]]:
    """The folder of extensions that ranks in folders beside it use, and their launcher, whose servers need no environment."""
    launcher = ForkServerLauncher(worker_module="tests.integration.extension_worker")
    yield tmp_path_factory.mktemp("ranks") / "extensions", launcher
    launcher.close()


@pytest.mark.ranks
@pytest.mark.exhaustive
def test_a_lock_left_by_a_killed_build_holds_nobody_up(extensions: tuple[Path, ForkServerLauncher]) -> None:
    """torch waits for ever for a build whose process is gone; ours does not, and the cell runs."""
    folder, launcher = extensions
    _copy_extensions(folder)
    stale = folder / "deepspeed_shm_comm" / "lock"
    stale.parent.mkdir(parents=True, exist_ok=True)
    stale.touch()
    record = launch_cell(tiny_cell(backend="zero1"), MEASURE, launch=1, folder=folder.parent / "locked", launcher=launcher)
    assert record["status"] == "ok", record["error"]
    assert not stale.exists()


@pytest.mark.ranks
def test_compiling_is_a_stage_of_the_launch_that_does_it(extensions: tuple[Path, ForkServerLauncher]) -> None:
    """Linking is all that is left to do here, so that the test does not take as long as compiling does."""
    root, launcher = extensions
    shared_object = _linkable_extension(root)
    folder = root.parent / "compiling"
    record = launch_cell(tiny_cell(backend="zero1"), MEASURE, launch=1, folder=folder, launcher=launcher)
    assert record["status"] == "ok", record["error"]
    assert shared_object.exists()
    events = [read_events(folder / f"events-rank{rank}.jsonl", 0)[0] for rank in range(2)]
    stages = [[event["stage"] for event in rank_events if event["event"] == "progress"][:4] for rank_events in events]
    assert ["build", "prepare", "compile_extension", "prepare"] in stages, "the other rank may come when all is compiled"


def test_doctor_compiles_the_extension_beforehand(tmp_path: Path) -> None:
    shared_object = _linkable_extension(tmp_path)
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    before = run_in_process("doctor", variables=variables).stdout
    doctor = [sys.executable, "-m", "benchbox.cli.app", "doctor", "--compile"]
    compiled = subprocess.run(
        doctor, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "warn     extension      not compiled" in before
    assert compiled.startswith("compiling DeepSpeed's CPU extension, once per environment\n")
    assert f"ok       extension      {shared_object}\n" in compiled


def _copy_extensions(folder: Path) -> None:
    """Copy what is compiled in this environment, so that it need not be compiled again."""
    user = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
    built = Path(host_variables(user)["TORCH_EXTENSIONS_DIR"])
    if built.is_dir():
        shutil.copytree(built, folder, dirs_exist_ok=True)


def _linkable_extension(folder: Path) -> Path:
    """Copy what is compiled in this environment, without the shared object. Return the path of the shared object."""
    _copy_extensions(folder)
    shared_object = extension_file(folder)
    shared_object.unlink(missing_ok=True)
    return shared_object
