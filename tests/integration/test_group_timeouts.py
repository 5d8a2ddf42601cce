"""The timeouts of the process groups of real ranks: the launcher judges what is a hang, before a collective gives up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.job import Job
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.launch.supervise.group import ignore_progress, never_stop, run_group
from benchbox.launch.supervise.watch import _OPAQUE_LIMIT_S
from benchbox.registry.phases import CHECKPOINT_LIMIT_S, GROUP_TIMEOUT_S
from benchbox.spec.cell import MeasureSpec
from benchbox.spec.train import load_train
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

HANG_AFTER_S = 4000.0
LONGEST_LIMIT_S = max(_OPAQUE_LIMIT_S, CHECKPOINT_LIMIT_S + HANG_AFTER_S)


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkServerLauncher]:
    launcher = ForkServerLauncher(worker_module="tests.integration.timeouts_worker")
    yield launcher
    launcher.close()


def timeouts(folder: Path) -> list[list[float]]:
    """Return the timeouts of the groups of both ranks."""
    return [json.loads((folder / f"timeouts-rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("backend", ["ddp", "hsdp", "zero2"])
def test_no_group_of_a_backend_gives_up_before_the_launcher(backend: str, launcher: ForkServerLauncher, tmp_path: Path) -> None:
    """Meshes and DeepSpeed create further groups, and DeepSpeed the first one with a default of its own."""
    cell = tiny_cell(backend=backend, world_size=4 if backend == "hsdp" else 2)
    measure = MeasureSpec(warmup_steps=1, steps=1, launches=1, hang_after_s=HANG_AFTER_S)
    record = launch_cell(cell, measure, launch=1, folder=tmp_path / "launch", launcher=launcher)
    assert record["status"] == "ok", record["error"]
    for groups in timeouts(tmp_path / "launch"):
        assert len(groups) > (2 if backend == "hsdp" else 0)
        assert min(groups) > LONGEST_LIMIT_S


def test_no_group_of_a_training_or_of_measured_links_gives_up_before_the_launcher(
    launcher: ForkServerLauncher, tmp_path: Path
) -> None:
    """Only the group of checkpoints has a lower limit, and the launcher waits for longer."""
    (tmp_path / "train.yaml").write_text(
        "name: t\npolicy: pi05\nsize: tiny\ndata: synthetic\nbackend: ddp\nworld_size: 2\nbatch: 2\nsteps: 1\n"
        f"log_every: 1\nhang_after_s: {HANG_AFTER_S}\n"
    )
    config = load_train(tmp_path / "train.yaml")
    training = {
        "kind": "train",
        "train": config.to_dict(),
        "folder": str(tmp_path),
        "checkpoint": None,
        "policy_dirs": [],
    }
    for job_config in (training, {"kind": "links", "sizes": [1024]}):
        folder = tmp_path / str(job_config["kind"])
        job = Job(config=job_config, ranks=2, folder=folder, timeout_s=None, hang_after_s=HANG_AFTER_S)  # type: ignore[arg-type]
        outcome = run_group(job, launcher, on_progress=ignore_progress, stop=never_stop)
        assert outcome.status == "ok", outcome.error
        for groups in timeouts(folder):
            assert GROUP_TIMEOUT_S in groups
            assert all(timeout > LONGEST_LIMIT_S or timeout == CHECKPOINT_LIMIT_S for timeout in groups)
