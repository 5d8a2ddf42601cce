"""Ranks start from the published weights that a matrix or a training file names, and the record and the report say so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from benchbox.dcp.files import TensorFolder
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from tests.support.commands import run_in_process

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.ranks

CELL = """
name: w
policy: pi05
size: tiny
data: synthetic
backend: {backend}
world_size: {ranks}
batch: 1
recipe: fp32
weights: published.safetensors
"""
MATRIX = CELL.format(backend="fsdp2", ranks=2) + "measure: {warmup_steps: 1, steps: 1, launches: 1}\n"
STANDING = "{lr: 1.0e-30, schedule: warmup_constant, warmup_steps: 1, weight_decay: 0.0}"  # too little to move a float32
TRAINING = CELL.format(backend="single", ranks=1) + f"optim: {STANDING}\nsteps: 1\ncheckpoint: {{every: 1}}\n"


@pytest.fixture
def published(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Weights of pi05 without its FAST tokens, two under openpi's names. Actions are off by a thousand: the loss shows it."""
    policy = build_policy("pi05", "tiny", Axes())
    parameters = {
        name: parameter.detach() + 0.01
        for name, parameter in policy.named_parameters()  # type: ignore[attr-defined]
        if not name.startswith("discrete.")
    }
    parameters["action_out.bias"] += 1000.0
    renamed = {"action_out.bias": "action_out_proj.bias", "time.inner.weight": "time_mlp_in.weight"}
    save_file({renamed.get(name, name): tensor for name, tensor in parameters.items()}, tmp_path / "published.safetensors")
    return parameters


def benchbox(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(*arguments, cwd=folder)


def test_a_run_measures_from_published_weights_and_its_record_and_report_say_so(
    tmp_path: Path, published: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "w.yaml").write_text(MATRIX)
    done = benchbox(tmp_path, "run", "w.yaml", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "out").rglob("launch-1.json")
    record: dict[str, Any] = json.loads(path.read_text())
    assert record["cell"]["weights"] == "published.safetensors"
    missing = ["discrete.embedding.weight", "discrete.head.weight", "discrete.head.bias"]
    loaded = {"loaded": len(published), "missing": missing}
    assert record["observed"]["weights"] == {**loaded, "unexpected": [], "fitted": {}}
    assert min(record["loss"]) > 1e5
    report = (tmp_path / "out" / "report.html").read_text()
    assert "published weights" in report
    assert f"{len(published)} parameters; not in it: {', '.join(missing)}" in report


def test_training_starts_from_published_weights_and_keeps_what_was_taken_of_them(
    tmp_path: Path, published: dict[str, torch.Tensor]
) -> None:
    """After a step too small to move a float32, what it saves is what the file holds."""
    (tmp_path / "w.yaml").write_text(TRAINING)
    done = benchbox(tmp_path, "train", "w.yaml", "--out", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out" / "weights.json").read_text())["loaded"] == len(published)
    (checkpoint,) = (tmp_path / "out").rglob("step-*/tensors")
    saved = TensorFolder(checkpoint).read([f"weights/{name}" for name in published])
    assert all(torch.equal(saved[f"weights/{name}"], tensor) for name, tensor in published.items())
