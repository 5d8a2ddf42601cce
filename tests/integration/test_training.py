"""Training is the measured step, with metrics and checkpoints around it."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchbox.dcp.files import TensorFolder, write_shards
from benchbox.dcp.shards import full_shards
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from benchbox.spec.train import load_train
from benchbox.store.checkpoints import describe_files, read_manifest
from benchbox.store.files import read_json
from benchbox.trainer.checkpoint.generators import generator_states
from tests.support.commands import run_in_process
from tests.support.metrics_rows import without_measurements
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: pi05
size: tiny
data: synthetic
backend: {backend}
world_size: {ranks}
batch: {batch}
accumulation: 2
recipe: bf16_master
seed: 3
optim: {{lr: 1.0e-3, warmup_steps: 2, total_steps: 8, weight_decay: 0.1}}
steps: 6
log_every: 1
checkpoint: {{every: 3, keep: 2}}
"""


def train(config: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("train", config, "--out", out, *more)


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return without_measurements(rows)


def train_straight(folder: Path, backend: str) -> tuple[Path, Path]:
    """Return a configuration, and the folder of its training taken in one go."""
    ranks = 2 if backend == "ddp" else 1
    config = folder / "train.yaml"
    config.write_text(TRAINING.format(backend=backend, ranks=ranks, batch=4 // ranks))
    done = train(config, folder / "straight")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text: random tokens\n")
    assert done.stdout.count("text: ") == 1
    assert "step 6/6" in done.stdout
    return config, folder / "straight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_straight(tmp_path_factory.mktemp("single"), "single")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return train_straight(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.fixture(params=in_tiers(["single", "ddp"], "ddp".__eq__))
def straight(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Each of the two."""
    trained: tuple[Path, Path] = request.getfixturevalue(request.param)
    return trained


@pytest.mark.exhaustive
def test_new_interpreters_give_the_training_of_forked_ones(
    ddp: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the last bit. No fork server could start here, because it would find a thread that a fork loses."""
    config, out = ddp
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = train(config, tmp_path / "out", "--launcher", "torchrun")
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "out") == metrics(out)


def test_benchmark_and_training_give_the_same_losses(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """`benchbox run` and `benchbox train` from one seed: losses and gradient norms are equal to the last bit."""
    config, out = straight
    measure = MeasureSpec(warmup_steps=2, steps=4, launches=1)
    launcher = ForkServerLauncher()
    record = launch_cell(load_train(config).cell, measure, launch=1, folder=tmp_path / "launch", launcher=launcher)
    launcher.close()
    assert record["status"] == "ok", record["error"]
    assert record["loss"] == [row["loss"] for row in metrics(out)]
    assert record["grad_norm"] == [row["grad_norm"] for row in metrics(out)]
    assert {row["samples"] for row in metrics(out)} == {8}, "4 a micro-step over all ranks, two micro-steps"


def test_a_training_resumed_from_before_a_damaged_checkpoint_is_the_same_training(
    straight: tuple[Path, Path], tmp_path: Path
) -> None:
    """One changed bit is enough, and its checkpoint is named and set aside. Resumed after three steps, the training has the
    metrics of one that never stopped, and in the end the same weights, moments, masters, schedule and generators of every
    rank, bit for bit."""
    config, out = straight
    shutil.copytree(out, tmp_path / "cut", symlinks=True)
    damaged = tmp_path / "cut/checkpoints/step-00000006/tensors/__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    # No step of this policy draws from the generators of the ranks: what each restored, it saves again.
    generators = replace_generators(tmp_path / "cut/checkpoints/step-00000003")
    resumed_run = train(config, tmp_path / "cut", "--resume")
    assert resumed_run.returncode == 0, resumed_run.stderr
    reason = "step-00000006: damaged checkpoint (tensors/__0_0.distcp has other contents than were saved)"
    assert reason in resumed_run.stderr
    assert "resuming after step 3 (24 samples)\n" in resumed_run.stdout
    assert sorted(path.name for path in (tmp_path / "cut/checkpoints").iterdir()) == [
        "damaged-step-00000006", "latest", "step-00000003", "step-00000006",
    ]  # fmt: skip
    assert metrics(tmp_path / "cut") == metrics(out)
    name = "checkpoints/step-00000006"
    expected, resumed = (read_all(folder / name) for folder in (out, tmp_path / "cut"))
    assert expected.keys() == resumed.keys()
    assert {key for key in expected if not torch.equal(expected[key], resumed[key])} == set(generators)
    assert all(torch.equal(resumed[key], state) for key, state in generators.items())
    assert read_json(out / name / "trainer.json") == read_json(tmp_path / "cut" / name / "trainer.json")
    masters = [tensor for key, tensor in expected.items() if key.startswith("weights/") and tensor.numel() > 100]
    assert not any(torch.equal(master, master.bfloat16().float()) for master in masters), "saved, not derived from live weights"
    assert {key.split("/")[1] for key in expected if key.startswith("state/")} == {"exp_avg", "exp_avg_sq"}


def test_a_training_is_not_overwritten_and_not_mixed_with_another(ddp: tuple[Path, Path]) -> None:
    """Without --resume a folder that holds a training is left alone; with it, another configuration is refused by name."""
    config, out = ddp
    again = train(config, out)
    assert (again.returncode, again.stdout) == (2, "")
    assert "--resume continues it" in again.stderr
    mixed = train(config, out, "--resume", "--set", "optim.lr=1.0e-4,steps=9")
    assert mixed.returncode == 2
    assert "optim.lr is 0.001 there and 0.0001 here" in mixed.stderr
    assert len(mixed.stderr.splitlines()) == 1


def test_without_an_intact_checkpoint_the_damaged_one_is_named(ddp: tuple[Path, Path], tmp_path: Path) -> None:
    """A cut-off file gives one line with the checkpoint and what to do."""
    config, out = ddp
    shutil.copytree(out, tmp_path / "copy", symlinks=True)
    shutil.rmtree(tmp_path / "copy/checkpoints/step-00000006")
    damaged = tmp_path / "copy/checkpoints/step-00000003/tensors/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    refused = train(config, tmp_path / "copy", "--resume")
    assert refused.returncode == 2
    assert "step-00000003: damaged checkpoint (tensors/__0_0.distcp has 1000 bytes" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_training_continues_on_another_backend_and_says_what_changed(ddp: tuple[Path, Path], tmp_path: Path) -> None:
    """Two ranks continue on one process; that their losses are those of a training that stays, test_resumes shows."""
    config, out = ddp
    shutil.copytree(out, tmp_path / "moved", symlinks=True)
    (tmp_path / "moved/validation.jsonl").write_text('{"step": 7}\n')  # of an earlier run; this one does not validate
    moved = train(config, tmp_path / "moved", "--resume", "--set", "steps=7,backend=single,world_size=1,batch=4")
    assert moved.returncode == 0, moved.stderr
    line = "resuming after step 6 (48 samples); changed: backend is 'ddp' there and 'single' here, "
    line += "batch is 2 there and 4 here, world_size is 2 there and 1 here\n"
    assert line in moved.stdout
    assert any(line in log.read_text() for log in (tmp_path / "moved/launch").rglob("*.log"))
    assert metrics(tmp_path / "moved")[:6] == metrics(out)
    assert [row["step"] for row in metrics(tmp_path / "moved")] == list(range(7))


def test_a_resumed_training_that_saves_no_checkpoints_is_the_same_training(single: tuple[Path, Path], tmp_path: Path) -> None:
    """It continues from the newest checkpoint of the earlier run, and adds none."""
    config, out = single
    shutil.copytree(out, tmp_path / "unsaved", symlinks=True)
    shutil.rmtree(tmp_path / "unsaved/checkpoints/step-00000006")
    resumed = train(config, tmp_path / "unsaved", "--resume", "--set", "checkpoint.every=0")
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step 3 (24 samples)\n" in resumed.stdout
    assert metrics(tmp_path / "unsaved") == metrics(out)
    assert [path.name for path in (tmp_path / "unsaved/checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_training_that_is_complete_starts_no_ranks_and_says_how_to_go_on(ddp: tuple[Path, Path], tmp_path: Path) -> None:
    config, out = ddp
    shutil.copytree(out, tmp_path / "complete", symlinks=True)
    shutil.rmtree(tmp_path / "complete/launch")
    done = train(config, tmp_path / "complete", "--resume")
    assert done.returncode == 0, done.stderr
    assert "the newest checkpoint is after 6 steps, and steps is 6: nothing is left to train; --steps N" in done.stdout
    assert not (tmp_path / "complete/launch").exists()
    assert metrics(tmp_path / "complete") == metrics(out)


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    folder = TensorFolder(checkpoint / "tensors")
    return folder.read(folder.layout)


@contextmanager
def seeded_python_and_numpy() -> Iterator[None]:
    """Restore the generators of Python and numpy at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def replace_generators(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Give the generators of a checkpoint other states, different for every rank, and return these by key."""
    tensors = read_all(checkpoint)
    keys = [key for key in tensors if key.startswith("rng/")]
    states = {}
    with torch.random.fork_rng(), seeded_python_and_numpy():
        for rank, key in enumerate(keys):
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(7 + rank)
            states[key] = generator_states(torch.device("cpu"))[key.rpartition("/")[2]]
    shutil.rmtree(checkpoint / "tensors")
    write_shards(checkpoint / "tensors", {key: full_shards(tensor) for key, tensor in (tensors | states).items()}, None)
    files = [*(checkpoint / "tensors").iterdir(), checkpoint / "trainer.json"]
    replace(read_manifest(checkpoint), files=describe_files(checkpoint, files)).write(checkpoint)
    return states
