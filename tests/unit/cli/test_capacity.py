"""Cells of more ranks than this machine can run are skipped by a run, with the reason."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pynvml
import pytest
from rich.console import Console

from benchbox.cli.capacity import skip_beyond_capacity
from benchbox.errors import EXIT_USAGE
from benchbox.launch import capacity, training
from benchbox.launch.capacity import capacity_refusal, device_memory_bytes
from benchbox.launch.training_progress import TrainingProgress
from benchbox.plan import Plan, Skip
from benchbox.spec.train import load_train
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.example_run import CELL, example_record, example_run
from tests.support.instant_launches import InstantLaunches, matrix_of_backends

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (2, 16), (64, 512)])
def test_eight_ranks_run_on_each_core_and_not_one_more(cores: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: cores)
    assert capacity_refusal(most) is None
    assert f"{most + 1} ranks are more than {most}, 8 for each of the {cores} usable cores" in str(capacity_refusal(most + 1))


class FakeNVML:
    """Three devices, whose handles are their numbers, and a MIG device."""

    NVMLError = pynvml.NVMLError
    memory_gib = {0: 80, 1: 16, 2: 40, "MIG-7": 10}  # noqa: RUF012 (as a module has it)
    uuids = ("GPU-aa0", "GPU-bb1", "GPU-cc2")

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)  # noqa: N815
    nvmlDeviceGetCount = staticmethod(lambda: 3)  # noqa: N815
    nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = staticmethod(lambda name: name)  # noqa: N815
    nvmlDeviceGetUUID = classmethod(lambda cls, device: cls.uuids[device])  # noqa: N815
    nvmlDeviceGetMemoryInfo = classmethod(lambda cls, device: SimpleNamespace(total=cls.memory_gib[device]))  # noqa: N815


@pytest.mark.parametrize(
    ("names", "smallest"),
    [
        (None, 16),
        ("0,1,2", 16),
        ("0", 80),
        ("2, 0", 40),
        ("GPU-cc", 40),
        ("GPU-aa0,GPU-cc2", 40),
        ("0,9,1", 80),
        ("MIG-7", 10),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_the_smallest_device_is_one_that_ranks_see(
    names: str | None, smallest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert device_memory_bytes() == smallest


@pytest.mark.parametrize("job", [None, "7"])
def test_a_run_and_a_training_whose_ranks_share_cores_warn_in_one_line(
    job: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of Slurm that was not told otherwise gives its task one core, for the eight ranks of a node."""
    monkeypatch.setattr(capacity, "usable_cores", lambda: 1)
    monkeypatch.setattr("benchbox.cli.run_here.run_matrix", InstantLaunches({}))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    remedy = "" if job is None else "; a job of Slurm has more by --slurm cpus_per_task"
    warning = f"warning: 2 ranks share 1 usable cores of this machine, and wait for one another{remedy}"
    (tmp_path / "two.yaml").write_text(matrix_of_backends("ddp", launches=1))
    done = run_in_process("run", "two.yaml", "--out", "run", "--no-estimate", cwd=tmp_path)
    assert done.stdout.splitlines().count(warning) == 1, done.stdout + done.stderr
    config = load_train("pi05", {"backend": "ddp", "world_size": "2"})
    progress = TrainingProgress(config, Console(file=io.StringIO()))
    training._check(config, tmp_path, resume=False, nnodes=1, progress=progress)
    assert capsys.readouterr().err == f"{warning}\n"
    training._check(config, tmp_path, resume=False, nnodes=2, progress=progress)
    assert capsys.readouterr().err == "", "one rank on each node"


def test_only_the_cells_of_too_many_ranks_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "usable_cores", lambda: 1)
    small, large = CELL, replace(CELL, world_size=9)
    earlier = Skip(replace(CELL, batch=7), "some reason")
    planned = skip_beyond_capacity(Plan((small, large), (earlier,)))
    assert planned.cells == (small,)
    assert planned.skipped == (earlier, Skip(large, str(capacity_refusal(9))))


def test_a_measured_cell_of_too_many_ranks_is_not_profiled(tmp_path: Path) -> None:
    cell = replace(CELL, world_size=1000)
    store = RunStore(tmp_path)
    store.write_run(example_run([cell]))
    store.write_record(example_record(cell))
    refused = run_in_process("profile", tmp_path, "--cell", cell.cell_id, "--out", tmp_path / "profile")
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith(f"error: {tmp_path}: 1000 ranks are more than ")
    assert not (tmp_path / "profile").exists()
