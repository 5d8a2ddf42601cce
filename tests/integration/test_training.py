"""Training is the measured step, with metrics and checkpoints around it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from benchbox.trainer.gauges import MEASURED_FIELDS

if TYPE_CHECKING:
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


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchbox.cli.app", *arguments]


def train(config: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("train", str(config), "--out", str(out), *more), capture_output=True, text=True, timeout=300)


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in MEASURED_FIELDS} for row in rows]


@pytest.fixture(scope="module", params=["single", "ddp"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration, and the folder of its training taken in one go."""
    folder = tmp_path_factory.mktemp(request.param)
    ranks = 2 if request.param == "ddp" else 1
    config = folder / "train.yaml"
    config.write_text(TRAINING.format(backend=request.param, ranks=ranks, batch=4 // ranks))
    done = train(config, folder / "straight")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text: random tokens\n")
    assert done.stdout.count("text: ") == 1
    assert "step 6/6" in done.stdout
    return config, folder / "straight"


def test_new_interpreters_give_the_training_of_forked_ones(
    straight: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the last bit. No fork server could start here, because it would find a thread that a fork loses."""
    config, out = straight
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


def test_a_resumed_training_is_the_same_training(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """Stopped after three steps and resumed, a training has the metrics of one that never stopped, and in the end the same
    weights, moments, masters, schedule and generators of every rank, bit for bit."""
    config, out = straight
    interrupted = train(config, tmp_path / "cut", "--set", "steps=3")
    assert interrupted.returncode == 0, interrupted.stderr
    # No step of this policy draws from the generators of the ranks: what each restored, it saves again.
    generators = replace_generators(tmp_path / "cut/checkpoints/step-00000003")
    resumed_run = train(config, tmp_path / "cut", "--resume")
    assert resumed_run.returncode == 0, resumed_run.stderr
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


def test_an_interrupted_training_resumes(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit code 130 and the way to resume; afterwards the metrics are those of an uninterrupted run."""
    config, _ = straight
    out = tmp_path / "interrupted"
    sets = ["--set", "steps=400,checkpoint.every=5"]
    running = subprocess.Popen(command("train", str(config), "--out", str(out), *sets), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(out.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "--resume" in stderr
    (newest,) = sorted(path.name for path in out.glob("checkpoints/step-*"))[-1:]
    steps = int(newest.removeprefix("step-")) + 2
    done = train(config, out, "--resume", "--set", f"steps={steps},checkpoint.every=5")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(out)] == list(range(steps))
    assert [row["loss"] for row in metrics(out)][:6] == [row["loss"] for row in metrics(straight[1])][:6]


def test_a_training_is_not_overwritten_and_not_mixed_with_another(straight: tuple[Path, Path]) -> None:
    """Without --resume a folder that holds a training is left alone; with it, another configuration is refused by name."""
    config, out = straight
    again = train(config, out)
    assert (again.returncode, again.stdout) == (2, "")
    assert "--resume continues it" in again.stderr
    mixed = train(config, out, "--resume", "--set", "optim.lr=1.0e-4,steps=9")
    assert mixed.returncode == 2
    assert "optim.lr is 0.001 there and 0.0001 here" in mixed.stderr
    assert len(mixed.stderr.splitlines()) == 1


def test_a_damaged_checkpoint_is_named(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """A cut-off file gives one line with the checkpoint and what to do, and the log keeps the rest."""
    config, _ = straight
    done = train(config, tmp_path, "--set", "steps=3")
    assert done.returncode == 0, done.stderr
    damaged = tmp_path / "checkpoints/step-00000003/tensors/__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    refused = train(config, tmp_path, "--resume")
    assert refused.returncode == 2
    assert "step-00000003: damaged checkpoint (tensors/__0_0.distcp has 1000 bytes" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_training_resumes_from_the_checkpoint_before_a_damaged_one(straight: tuple[Path, Path], tmp_path: Path) -> None:
    """One changed bit is enough. The line names the checkpoint, and the metrics are those of an undisturbed training."""
    config, out = straight
    copy = tmp_path / "copy"
    shutil.copytree(out, copy, symlinks=True)
    damaged = copy / "checkpoints/step-00000006/tensors/__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    resumed = train(config, copy, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000006: damaged checkpoint (tensors/__0_0.distcp has other contents than were saved)" in resumed.stderr
    assert "resuming after step 3 (24 samples)\n" in resumed.stdout
    assert metrics(copy) == metrics(out)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == [
        "damaged-step-00000006", "latest", "step-00000003", "step-00000006",
    ]  # fmt: skip


def test_a_training_continues_on_another_backend_and_says_what_changed(tmp_path: Path) -> None:
    """Two ranks of ZeRO-2 continue on one process; the losses differ from an undisturbed training by rounding alone."""
    config = tmp_path / "train.yaml"
    config.write_text(TRAINING.format(backend="zero2", ranks=2, batch=2).replace("bf16_master", "fp32"))
    assert train(config, tmp_path / "moved", "--set", "steps=3").returncode == 0
    shutil.copytree(tmp_path / "moved", tmp_path / "stayed", symlinks=True)
    moved = train(config, tmp_path / "moved", "--resume", "--set", "backend=single,world_size=1,batch=4")
    assert moved.returncode == 0, moved.stderr
    line = "resuming after step 3 (24 samples); changed: backend is 'zero2' there and 'single' here, "
    line += "batch is 2 there and 4 here, world_size is 2 there and 1 here\n"
    assert line in moved.stdout
    assert any(line in log.read_text() for log in (tmp_path / "moved/launch").rglob("*.log"))
    assert train(config, tmp_path / "stayed", "--resume").returncode == 0
    losses, expected = ([row["loss"] for row in metrics(tmp_path / name)] for name in ("moved", "stayed"))
    assert losses == pytest.approx(expected, rel=1e-5)


def read_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    folder = TensorFolder(checkpoint / "tensors")
    return folder.read(folder.layout)


def replace_generators(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Give the generators of a checkpoint other states, different for every rank, and return these by key."""
    tensors = read_all(checkpoint)
    keys = [key for key in tensors if key.startswith("rng/")]
    states = {key: torch.Generator().manual_seed(7 + rank).get_state() for rank, key in enumerate(keys)}
    shutil.rmtree(checkpoint / "tensors")
    write_shards(checkpoint / "tensors", {key: full_shards(tensor) for key, tensor in (tensors | states).items()}, None)
    files = [*(checkpoint / "tensors").iterdir(), checkpoint / "trainer.json"]
    replace(read_manifest(checkpoint), files=describe_files(checkpoint, files)).write(checkpoint)
    return states
