"""A checkpoint gives its policy to whoever asks: loaded without ranks, or exported under the names of other projects."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import default_collate

from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.dcp.files import TensorFolder
from benchbox.errors import DataError, UnsupportedError
from benchbox.observer.introspect.names import live_buffers
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.trainer.checkpoint import load_policy
from tests.support.commands import run_in_process
from tests.support.ranks import tiny_cell
from tests.support.resumes import TrainingPart, run_parts

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.ranks

# Saved in flat shards and in partitions of DeepSpeed: loading must join them.
FLOW = tiny_cell(size="tiny_flow", backend="fsdp1_full")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TrainingPart]:
    folder = tmp_path_factory.mktemp("trained")
    parts = {
        "flow": TrainingPart(FLOW, folder / "flow", 2),
        "fast": TrainingPart(tiny_cell(backend="zero2"), folder / "fast", 2, averages=False),
        "expert": TrainingPart(
            replace(FLOW, freeze="train_expert_only"), folder / "expert", 2, section={"trainable_only": True}
        ),
    }
    run_parts(list(parts.values()))
    return parts


def export(part: TrainingPart, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("export", part.folder, *arguments)


@pytest.mark.parametrize("name", ["flow", "fast"])
def test_a_loaded_policy_has_the_masters_and_the_statistics(parts: dict[str, TrainingPart], name: str) -> None:
    """In float32: the digits that the live bfloat16 weights lack are there. It acts, and gives losses."""
    part = parts[name]
    policy = load_policy(part.folder)
    saved = part.tensors()
    for parameter_name, parameter in policy.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, saved[f"weights/{parameter_name}"])
    buffers = dict(live_buffers(policy))
    assert buffers.keys() == {key.partition("/")[2] for key in saved if key.startswith("buffers/")}
    assert all(torch.equal(buffer, saved[f"buffers/{buffer_name}"]) for buffer_name, buffer in buffers.items())
    assert not policy.training
    spec = policy.batch_spec()
    batch = default_collate([SyntheticSamples(spec, seed=1).sample(0, index) for index in range(2)])
    with torch.no_grad():
        assert policy(batch).total.isfinite()
        assert policy(batch, act=True).shape == (2, spec.horizon, spec.action_dim)


def test_averages_of_the_weights_are_loaded_in_their_place(parts: dict[str, TrainingPart]) -> None:
    """Parameters that nothing trains have no average, and are loaded as they are."""
    saved, trained = parts["flow"].tensors(), parts["flow"].trainer()["parameters"]
    for name, parameter in load_policy(parts["flow"].folder, averages=True).named_parameters():
        assert torch.equal(parameter, saved[f"weights/{name}"] + (name in trained)), name


def test_frozen_weights_that_are_not_in_the_checkpoint_come_from_the_seed(parts: dict[str, TrainingPart]) -> None:
    policy = load_policy(parts["expert"].checkpoint())
    saved = {key.partition("/")[2]: tensor for key, tensor in parts["expert"].tensors().items() if key.startswith("weights/")}
    torch.manual_seed(FLOW.seed)
    initial = dict(build_policy(FLOW.policy, FLOW.size, Axes(cams=FLOW.cams)).named_parameters())
    assert saved.keys() < initial.keys()
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, saved.get(name, initial[name]))


def test_export_writes_the_policys_own_names(parts: dict[str, TrainingPart], tmp_path: Path) -> None:
    done = export(parts["fast"], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    exported, saved = load_file(tmp_path / "model.safetensors"), parts["fast"].tensors()
    assert exported.keys() == {key.partition("/")[2] for key in saved if key.startswith(("weights/", "buffers/"))}
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved.get(f"weights/{name}", saved.get(f"buffers/{name}")))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "policy": "pi05", "size": "tiny", "steps": "2"}
    again = export(parts["fast"], "--out", str(tmp_path))
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "model.safetensors: exists" in again.stderr


@pytest.mark.parametrize("names", ["openpi", "lerobot"])
def test_what_is_exported_under_published_names_loads_as_published_weights(
    parts: dict[str, TrainingPart], tmp_path: Path, names: str
) -> None:
    """And gives the same policy, rounded to the dtype that was asked for."""
    done = export(parts["flow"], "--out", str(tmp_path / "flow.safetensors"), "--format", names, "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    exported = load_file(tmp_path / "flow.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(key.startswith("model.") for key in exported) == (names == "lerobot")
    policy = build_policy(FLOW.policy, FLOW.size, Axes(cams=FLOW.cams))
    policy.load_weights(tmp_path / "flow.safetensors")
    for name, parameter in load_policy(parts["flow"].folder).named_parameters():
        assert torch.equal(dict(policy.named_parameters())[name], parameter.bfloat16().float()), name


def test_others_may_read_an_exported_file_as_they_may_read_any_other(parts: dict[str, TrainingPart], tmp_path: Path) -> None:
    assert export(parts["flow"], "--out", str(tmp_path)).returncode == 0
    (tmp_path / "other").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_cannot_be_exported_is_one_line(parts: dict[str, TrainingPart], tmp_path: Path) -> None:
    """A policy that openpi does not have; a file that cannot be written, as on a full disk; averages that were not trained; a
    folder without a checkpoint.
    """
    unknown = export(parts["fast"], "--out", str(tmp_path), "--format", "openpi")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (3, 1)
    assert "cannot be exported: openpi and LeRobot have no weights for its" in unknown.stderr
    (tmp_path / ".model.safetensors.partial").mkdir()
    unwritten = export(parts["fast"], "--out", str(tmp_path))
    assert (unwritten.returncode, unwritten.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path / 'model.safetensors'}: could not be written (Error while serializing: I/O error: " in unwritten.stderr
    with pytest.raises(DataError, match="has no averages of the weights; train with an EMA"):
        load_policy(parts["fast"].folder, averages=True)
    with pytest.raises(DataError, match="no checkpoint of benchbox train: give a folder step-<n>"):
        load_policy(tmp_path)


def test_a_weight_that_has_changed_on_disk_is_not_loaded(parts: dict[str, TrainingPart], tmp_path: Path) -> None:
    """The reader of tensors does not notice it."""
    damaged = tmp_path / "step-00000004"
    shutil.copytree(parts["flow"].checkpoint(), damaged)
    weight = TensorFolder(damaged / "tensors").read(["weights/action_out.weight"])["weights/action_out.weight"]
    start = weight.numpy().tobytes()[:16]
    (file,) = (path for path in (damaged / "tensors").glob("*.distcp") if start in path.read_bytes())
    file.write_bytes(file.read_bytes().replace(start, bytes(16)))
    with pytest.raises(DataError, match=rf"damaged checkpoint \(tensors/{file.name} has other contents than were saved\)"):
        load_policy(damaged)


def test_frozen_weights_that_a_gpu_drew_and_the_checkpoint_lacks_are_not_drawn_otherwise(
    parts: dict[str, TrainingPart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the same seed gives other numbers. A checkpoint of GPUs is known by the state of their generator."""
    opened = TensorFolder.__init__

    def open_of_gpu(self: TensorFolder, path: Path) -> None:
        opened(self, path)
        self.layout = {**self.layout, "rng/0/cuda": self.layout["rng/0/cpu"]}

    monkeypatch.setattr(TensorFolder, "__init__", open_of_gpu)
    assert load_policy(parts["flow"].folder) is not None, "it has its frozen weights"
    with pytest.raises(UnsupportedError, match="its frozen weights were drawn on a GPU"):
        load_policy(parts["expert"].folder)
