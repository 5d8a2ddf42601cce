"""Random trainings run, or say why they cannot; stopped and resumed, or moved to another set-up, they are the same."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchbox.dcp.files import TensorFolder
from benchbox.registry.recipes import recipe_by_name
from benchbox.store.checkpoints import checkpoint_steps, find_checkpoint, list_checkpoints
from tests.support.commands import run_in_process
from tests.support.metrics_rows import without_measurements
from tests.support.random_trainings import RandomTraining, random_training, write_datasets

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive]

SEEDS = range(8)  # none of which asks for what its policy or backend refuses


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_datasets(tmp_path_factory.mktemp("datasets"))


def rows(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if name not in ("seconds", "warning")} for row in lines]


def metrics(out: Path) -> list[dict[str, Any]]:
    return without_measurements(rows(out / "metrics.jsonl"))


def tensors(out: Path) -> dict[str, torch.Tensor]:
    folder = TensorFolder(find_checkpoint(out) / "tensors")
    return folder.read(folder.layout)


def train(folder: Path, out: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("train", folder / "train.yaml", "--out", folder / out, *arguments, variables={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_training_is_the_same_stopped_and_resumed_and_moved(seed: int, datasets: list[Path], tmp_path: Path) -> None:
    """Resumed on the same ranks, bit for bit; on others, with the same samples, to the rounding of the recipe."""
    training = random_training(seed, datasets)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(training.file))
    done = train(tmp_path, "straight")
    assert done.returncode == 0, done.stderr
    straight = metrics(tmp_path / "straight")
    assert [row["step"] for row in straight] == list(range(training.file["steps"]))
    check_resumed(training, tmp_path, straight)
    check_moved(training, tmp_path, straight)
    check_export_and_validation(training, tmp_path)


def check_resumed(training: RandomTraining, folder: Path, straight: list[dict[str, Any]]) -> None:
    for arguments in (("--steps", str(training.stop)), ("--resume",)):
        done = train(folder, "resumed", *arguments)
        assert done.returncode == 0, done.stderr
    assert metrics(folder / "resumed") == straight
    every = training.file.get("validation", {}).get("every", 1)
    validated = [
        row for row in rows(folder / "resumed/validation.jsonl") if row["step"] != training.stop or not row["step"] % every
    ]
    assert validated == rows(folder / "straight/validation.jsonl"), "but for the one at the end of the first part"
    expected, resumed = tensors(folder / "straight"), tensors(folder / "resumed")
    assert expected.keys() == resumed.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(tensor, resumed[key])] == []


def check_moved(training: RandomTraining, folder: Path, straight: list[dict[str, Any]]) -> None:
    shutil.copytree(folder / "straight", folder / "moved", symlinks=True)
    first, *later = list_checkpoints(folder / "moved/checkpoints")
    for checkpoint in later:
        shutil.rmtree(checkpoint)
    done = train(folder, "moved", "--resume", "--set", ",".join(f"{key}={value}" for key, value in training.move.items()))
    assert done.returncode == 0, done.stderr
    moved, start = metrics(folder / "moved"), checkpoint_steps(first)
    assert moved[:start] == straight[:start]
    for name in ("step", "lr", "samples", "epoch"):
        assert [row[name] for row in moved] == [row[name] for row in straight]
    tolerance = recipe_by_name(training.file["recipe"]).tolerance
    assert tolerance is not None
    if any(row.get("skipped") for row in straight + moved):  # a norm near the limit may be on its other side
        return
    assert [row["loss"] for row in moved] == pytest.approx([row["loss"] for row in straight], rel=tolerance.loss)


def check_export_and_validation(training: RandomTraining, folder: Path) -> None:
    """The exported weights are those of the checkpoint, and so is the validation of both."""
    averages = ["--ema"] if "ema_decay" in training.file["optim"] else []
    done = run_in_process("export", folder / "resumed", "--out", folder / "model.safetensors", *averages)
    assert done.returncode == 0, done.stderr
    saved, prefixes = tensors(folder / "straight"), ("averages/", "weights/", "buffers/")[0 if averages else 1 :]
    for name, tensor in load_file(folder / "model.safetensors").items():
        key = next(f"{prefix}{name}" for prefix in prefixes if f"{prefix}{name}" in saved)
        assert torch.equal(tensor, saved[key].to(tensor.dtype)), name
    if "validation" not in training.file:
        return
    options = ["--ema"] if training.file["validation"]["weights"] == "averages" else []
    done = run_in_process("validate", folder / "resumed", *options, "--out", folder / "validation.json")
    assert done.returncode == 0, done.stderr
    validated, logged = json.loads((folder / "validation.json").read_text()), rows(folder / "straight/validation.jsonl")[-1]
    tolerance = recipe_by_name(training.file["recipe"]).tolerance
    assert tolerance is not None
    assert (validated["samples"], validated["loss"]) == (
        logged["samples"],
        pytest.approx(logged["loss"], rel=tolerance.first_loss),
    )
