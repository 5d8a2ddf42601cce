"""The audit reads the checkpoints of `benchbox train` as what they are: masters, moments, options and buffers of a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.audit.judge import judge
from benchbox.audit.selection import Selection
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.backends.base import Prepared
from benchbox.errors import DataError
from benchbox.optim import build_schedule
from benchbox.registry.recipes import recipe_by_name
from benchbox.spec.cell import Cell
from benchbox.spec.train import CheckpointSection
from benchbox.store.checkpoints import read_manifest
from benchbox.trainer.checkpoint import CheckpointManager
from tests.support.small_session import OPTIM, SmallSession, batches

if TYPE_CHECKING:
    from pathlib import Path


def save(folder: Path, *, rederived: bool = False) -> Path:
    """Save a trained session; `rederived` masters hold nothing that bfloat16 does not."""
    session, stream = SmallSession(width=64), batches(width=64)
    session.model.register_buffer("inv_freq", torch.rand(4))
    for _ in range(3):
        session.step(stream)
    for master in session.optimizer.masters if rederived else ():
        master.copy_(master.bfloat16())
    cell = Cell(policy="small", size="tiny", backend="single", world_size=1, batch=2)
    return CheckpointManager(folder, cell, CheckpointSection(background=False)).save(session, 3)


def codes(checkpoint: Path) -> set[str]:
    return {finding.code for finding in judge(read_checkpoint(checkpoint), Selection()).findings}


def test_masters_moments_and_options_are_read(tmp_path: Path) -> None:
    (facts,) = read_checkpoint(save(tmp_path))
    assert [(tensor.name, tensor.dtype, tensor.live_dtype, tensor.live) for tensor in facts.stepped] == [
        ("0.weight", "float32", "bfloat16", False),
        ("0.bias", "float32", "bfloat16", False),
    ]
    weight = facts.stepped[0]
    assert weight.state == {"exp_avg": "float32", "exp_avg_sq": "float32"}
    assert (weight.shape, weight.live_ndim, weight.step_count, weight.betas) == ((64, 64), 2, 3.0, (0.9, 0.999))
    assert weight.lr == pytest.approx(0.0093303)
    assert weight.decoupled_decay is True
    assert facts.groups == ((0.01, 2),)
    assert {(entry.kind, entry.dtype, entry.elements) for entry in facts.entries} == {
        ("buffer", "float32", 4),
        ("master", "float32", 64 * 65),
        ("exp_avg", "float32", 64 * 65),
        ("exp_avg_sq", "float32", 64 * 65),
    }


def test_the_folder_of_a_training_leads_to_its_newest_checkpoint(tmp_path: Path) -> None:
    """The commands eval, export and validate find it in the same way."""
    checkpoint = save(tmp_path / "training" / "checkpoints")
    assert read_checkpoint(tmp_path / "training") == read_checkpoint(checkpoint)


def test_masters_that_were_derived_from_bfloat16_weights_are_reported(tmp_path: Path) -> None:
    """The rule for checkpoints of others reports them too; intact masters are not reported."""
    rederived = codes(save(tmp_path / "rederived", rederived=True)) - codes(save(tmp_path / "intact"))
    assert len(rederived) == 1


@pytest.mark.parametrize(("recipe", "reported"), [("bf16_pure", {"BXP101"}), ("bf16_stochastic", set())])
def test_stochastic_rounding_is_known_though_no_stored_tensor_shows_it(tmp_path: Path, recipe: str, reported: set[str]) -> None:
    session, stream = SmallSession(width=64), batches(width=64)
    optimizer = recipe_by_name(recipe).load_optimizer()(session.model.parameters(), lr=1e-2)
    session.backend.prepared = Prepared(session.model, optimizer, optimizer, build_schedule(optimizer, OPTIM))
    session.model(next(stream)).sum().backward()
    optimizer.step()
    cell = Cell(policy="small", size="tiny", backend="single", world_size=1, batch=2, recipe=recipe)
    checkpoint = CheckpointManager(tmp_path, cell, CheckpointSection(background=False)).save(session, 1)
    assert codes(checkpoint) & {"BXP101"} == reported


def test_a_backend_that_steps_its_parameters_has_no_masters(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    manifest = read_manifest(checkpoint)
    replace(manifest, topology=manifest.topology | {"backend": "fsdp2"}).write(checkpoint)
    (facts,) = read_checkpoint(checkpoint)
    assert [(tensor.live, tensor.live_dtype) for tensor in facts.stepped] == [(True, "float32")] * 2
    assert {entry.kind for entry in facts.entries} == {"parameter", "buffer", "exp_avg", "exp_avg_sq"}


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    checkpoint = save(tmp_path)
    (checkpoint / "tensors" / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"step-00000003: damaged checkpoint \(tensors/__0_0.distcp is missing\)"):
        read_checkpoint(checkpoint)


def test_a_checkpoint_whose_bytes_changed_is_one_line_and_not_judged(tmp_path: Path) -> None:
    """Its sizes are those that were saved."""
    checkpoint = save(tmp_path)
    file = checkpoint / "tensors" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    message = r"step-00000003: damaged checkpoint \(tensors/__0_0.distcp has other contents than were saved\)"
    with pytest.raises(DataError, match=message):
        read_checkpoint(checkpoint)
