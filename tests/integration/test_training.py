"""Training is the measured step, with metrics and checkpoints around it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.spec.cell import MeasureSpec
from benchbox.spec.train import load_train

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
    return [{key: value for key, value in row.items() if key != "step_s"} for row in rows]


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
    saved = sorted((tmp_path / "cut/checkpoints/step-00000003").glob("rng-rank*.pt"))
    generators = {path.name: torch.Generator().manual_seed(7 + rank).get_state() for rank, path in enumerate(saved)}
    for path in saved:
        torch.save({"cpu": generators[path.name]}, path)
    resumed_run = train(config, tmp_path / "cut", "--resume")
    assert resumed_run.returncode == 0, resumed_run.stderr
    assert metrics(tmp_path / "cut") == metrics(out)
    name = "checkpoints/step-00000006"
    weights, again = load_file(out / name / "model.safetensors"), load_file(tmp_path / "cut" / name / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    for part in ("optimizer.pt", "schedule.pt"):
        expected, resumed = (torch.load(folder / name / part, weights_only=True) for folder in (out, tmp_path / "cut"))
        assert flat(expected) == flat(resumed)
    restored = {path: torch.load(tmp_path / "cut" / name / path, weights_only=True)["cpu"] for path in generators}
    assert all(torch.equal(restored[path], state) for path, state in generators.items())
    masters = torch.load(out / name / "optimizer.pt", weights_only=True)["masters"]
    held_in_bf16 = [torch.equal(master, master.bfloat16().float()) for master in masters if master.numel() > 100]
    assert not any(held_in_bf16), "masters hold what bfloat16 cannot: they were saved, not derived from live weights"


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
    damaged = tmp_path / "checkpoints/step-00000003/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    refused = train(config, tmp_path, "--resume")
    assert refused.returncode == 2
    assert "step-00000003: damaged checkpoint" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_backend_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    """Checkpoints of a sharding backend are refused before anything starts, with the way around it."""
    config = tmp_path / "train.yaml"
    config.write_text(TRAINING.format(backend="fsdp2", ranks=2, batch=2))
    refused = train(config, tmp_path / "out")
    assert refused.returncode == 3
    assert "fsdp2 cannot be saved yet" in refused.stderr
    assert "checkpoint.every=0" in refused.stderr


def flat(value: Any) -> Any:
    """A nested state as comparable values, tensors by their bytes and dtype."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else float(value),
        )
    if isinstance(value, dict):
        return {str(key): flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value
