"""Checkpoints of one process, as their libraries write them, sound and spoilt."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from benchbox.audit.judge import judge
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from benchbox.optim import MasterWeightOptimizer

if TYPE_CHECKING:
    from pathlib import Path


def trained(dtype=torch.float32, optimizer=torch.optim.AdamW, steps=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)).to(dtype)
    stepping = optimizer(model.parameters(), **{"lr": 1e-3, **options})
    for _ in range(steps):
        model(torch.randn(4, 16, dtype=dtype)).square().mean().backward()
        stepping.step()
        stepping.zero_grad()
    return model, stepping


def fired(path: Path) -> dict[str, str]:
    return {finding.code: finding.severity for finding in judge(read_checkpoint(path)).findings}


def test_accelerates_state_folder_is_read_with_names_and_options(tmp_path):
    model, optimizer = trained(weight_decay=0.25)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    (facts,) = read_checkpoint(tmp_path / "state")
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in facts.stepped} == {
        "0.weight": ("float32", (32, 16)),
        "0.bias": ("float32", (32,)),
        "1.weight": ("float32", (8, 32)),
        "1.bias": ("float32", (8,)),
    }
    first = facts.stepped[0]
    assert (first.betas, first.weight_decay, first.numbers.steps_before) == ((0.9, 0.999), 0.25, 4)
    assert first.state == {"step": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert {entry.kind for entry in facts.entries} == {"parameter", "step", "exp_avg", "exp_avg_sq"}
    assert facts.missing["numbers"] == "a checkpoint shows no steps"
    assert fired(tmp_path / "state") == {}


def test_a_file_of_torch_save_is_read_whatever_its_keys_are(tmp_path):
    model, optimizer = trained(torch.bfloat16)
    torch.save({"net": {"weights": model.state_dict()}, "opts": [optimizer.state_dict()], "epoch": 3}, tmp_path / "last.ckpt")
    assert fired(tmp_path / "last.ckpt") == {"BXP101": "error", "BXP106": "warning", "BXP201": "error"}


def test_masters_derived_again_from_rounded_weights_are_found_out(tmp_path):
    """Saved as trained they are sound; upcast from the live weights, as a resume that lost them does, they are not."""
    model, optimizer = trained(torch.bfloat16, MasterWeightOptimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "sound.pt")
    assert fired(tmp_path / "sound.pt") == {}
    saved["optimizer"]["masters"] = [parameter.detach().float() for parameter in model.parameters()]
    torch.save(saved, tmp_path / "derived.pt")
    assert fired(tmp_path / "derived.pt") == {"BXP501": "error"}


def test_live_weights_that_are_not_the_rounded_masters_are_found(tmp_path):
    model, optimizer = trained(torch.bfloat16, MasterWeightOptimizer)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    (finding,) = judge(read_checkpoint(tmp_path / "last.pt")).findings
    assert finding.code == "BXP104"
    assert "0.weight" in json.dumps(finding.evidence)


def test_moments_that_went_through_bfloat16_are_found(tmp_path):
    model, optimizer = trained()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16().float()
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "last.pt")
    assert fired(tmp_path / "last.pt") == {"BXP502": "warning"}


def test_lerobots_training_state_is_read_with_the_model_beside_it(tmp_path):
    model, optimizer = trained(torch.bfloat16)
    (tmp_path / "pretrained_model").mkdir()
    save_file(model.state_dict(), tmp_path / "pretrained_model" / "model.safetensors")
    state = optimizer.state_dict()
    folder = tmp_path / "training_state"
    folder.mkdir()
    flat = {f"state/{number}/{name}": value for number, held in state["state"].items() for name, value in held.items()}
    save_file(flat, folder / "optimizer_state.safetensors")
    (folder / "optimizer_param_groups.json").write_text(json.dumps(state["param_groups"]))
    for path in (tmp_path, folder):
        (facts,) = read_checkpoint(path)
        assert [(tensor.name, tensor.dtype) for tensor in facts.stepped][:2] == [
            ("0.weight", "bfloat16"),
            ("0.bias", "bfloat16"),
        ]
        assert set(fired(path)) == {"BXP101", "BXP106", "BXP201"}
    (folder / "optimizer_param_groups.json").write_text("{")
    with pytest.raises(DataError, match=r"optimizer_param_groups\.json: cannot be read as JSON"):
        read_checkpoint(folder)


def test_weights_alone_show_buffers_and_say_what_cannot_be_judged(tmp_path):
    tensors = {"rope.inv_freq": torch.ones(8, dtype=torch.bfloat16), "layer.weight": torch.ones(4, 4)}
    save_file(tensors, tmp_path / "model.safetensors")
    judgement = judge(read_checkpoint(tmp_path / "model.safetensors"))
    assert [finding.code for finding in judgement.findings] == ["BXP602"]
    assert judgement.not_judged["BXP101"] == "the checkpoint holds no optimizer state"


class Bomb:
    """Runs a command when it is unpickled by anything that runs pickles."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    """One line that names the function that wanted to be called, for every way in."""
    mark = tmp_path / "exploded"
    torch.save({"model": Bomb(mark)}, tmp_path / "new.pt")
    torch.save({"model": Bomb(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Bomb(mark)))
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    (tmp_path / "state").mkdir()
    torch.save(Bomb(mark), tmp_path / "state" / "optimizer.bin")
    for name in ("new.pt", "old.pt", "plain.pt", "dcp", "state"):
        with pytest.raises(DataError) as caught:
            read_checkpoint(tmp_path / name)
        assert len(str(caught.value).splitlines()) == 1
        assert name.split(".")[0] in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut off", bytes(1000)])
@pytest.mark.parametrize("name", ["model.safetensors", "last.pt", "optimizer.bin", ".metadata"])
def test_a_damaged_file_is_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    path = tmp_path if name in {"optimizer.bin", ".metadata"} else tmp_path / name
    with pytest.raises(DataError) as caught:
        read_checkpoint(path)
    assert len(str(caught.value).splitlines()) == 1
    assert name in str(caught.value)


def test_what_is_not_there_or_no_checkpoint_says_so(tmp_path):
    with pytest.raises(DataError, match="no such file or directory"):
        read_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no checkpoint that is known here; DeepSpeed ZeRO directories"):
        read_checkpoint(tmp_path / "empty")
    torch.save({"epoch": 3}, tmp_path / "odd.pt")
    with pytest.raises(DataError, match="holds neither the tensors of a model nor the state of an optimizer"):
        read_checkpoint(tmp_path / "odd.pt")
