"""A checkpoint is complete or absent, and is restored only by the configuration that saved it."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.backends.base import Prepared
from benchbox.dcp.files import TensorFolder
from benchbox.errors import CheckpointError, ConfigurationError, DataError, UnsupportedError
from benchbox.optim import build_schedule
from benchbox.optim.kahan import KahanAdamW
from benchbox.spec.train import BestSection, CheckpointSection
from benchbox.store.checkpoints import list_checkpoints, read_manifest
from benchbox.store.files import read_json
from benchbox.trainer.checkpoint import CheckpointManager
from tests.support.small_session import OPTIM, SmallSession, batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from benchbox.spec.cell import Cell

FILES = ["checkpoint.json", "tensors/.metadata", "tensors/__0_0.distcp", "trainer.json"]


def weights(session: SmallSession) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.model.state_dict().items()}


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def saved_weight(checkpoint: Path) -> torch.Tensor:
    return TensorFolder(checkpoint / "tensors").read(["weights/0.weight"])["weights/0.weight"]


def test_a_checkpoint_has_the_documented_files_and_describes_itself(checkpoints: CheckpointManager, cell: Cell) -> None:
    session = SmallSession()
    session.step(batches())
    folder = checkpoints.save(session, 3)
    assert folder.name == "step-00000003"
    assert files_of(folder) == FILES
    manifest = read_manifest(folder)
    assert (manifest.steps, manifest.samples, manifest.cell, manifest.recipe) == (3, 6, cell.to_dict(), "bf16_master")
    assert manifest.topology == {"backend": "single", "world_size": 1, "mesh": [1]}
    assert {name: entry["bytes"] for name, entry in manifest.files.items()} == {
        name: (folder / name).stat().st_size for name in FILES[1:]
    }
    layout = TensorFolder(folder / "tensors").layout
    names = [f"{kind}/0.{name}" for kind in ("state/exp_avg", "state/exp_avg_sq", "weights") for name in ("bias", "weight")]
    assert sorted(key for key in layout if not key.startswith("rng/")) == names
    masters = TensorFolder(folder / "tensors").read(["weights/0.weight", "weights/0.bias"]).values()
    assert all(torch.equal(*pair) for pair in zip(masters, session.optimizer.masters, strict=True))
    assert not torch.equal(saved_weight(folder), saved_weight(folder).bfloat16().float()), "the masters were saved"
    trainer = read_json(folder / "trainer.json")
    entry = {"group": 0, "numbers": {"step": 1.0}}
    assert trainer["parameters"] == {"0.weight": entry, "0.bias": entry}
    assert trainer["schedule"]["last_epoch"] == 1


def test_the_newest_are_kept_and_latest_leads_to_the_newest(checkpoints: CheckpointManager, tmp_path: Path) -> None:
    for steps in (1, 2, 10):
        checkpoints.save(SmallSession(), steps)
        assert (tmp_path / "checkpoints/latest").resolve().name == f"step-{steps:08d}"
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000002", "step-00000010"]


def test_the_best_are_kept_beside_the_newest(tmp_path: Path, cell: Cell) -> None:
    """Lower scores are better. A checkpoint without a score is never the best."""
    section = CheckpointSection(every=1, keep=1, keep_best=BestSection(count=2))
    manager = CheckpointManager(tmp_path, cell, section)
    for steps, score in enumerate([0.5, 0.2, None, 0.3, 0.9], start=1):
        manager.save(SmallSession(), steps, score=score)
    manager.close()
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "4", "5"]
    assert read_manifest(list_checkpoints(tmp_path)[0]).score == 0.2


def test_a_step_that_is_repeated_replaces_its_checkpoint(checkpoints: CheckpointManager) -> None:
    checkpoints.save(SmallSession(), 2)
    session = SmallSession(seed=1)
    folder = checkpoints.save(session, 2)
    assert torch.equal(saved_weight(folder).bfloat16(), weights(session)["0.weight"])
    assert (folder.parent / "latest").resolve() == folder


def test_what_interrupted_saves_left_is_removed_by_the_next_one(checkpoints: CheckpointManager, tmp_path: Path) -> None:
    for name in (".partial-step-00000002", ".partial-step-00000001", ".removed-step-00000001"):
        (tmp_path / "checkpoints" / name / "tensors").mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "tensors" / "__7_0.distcp").write_bytes(b"")
    folder = checkpoints.save(SmallSession(), 2)
    assert files_of(folder) == FILES
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest", folder.name]


def refuse_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse to flush the manifest of a checkpoint: what a full disk does."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if "checkpoint.json" in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)


def save_and_wait(manager: CheckpointManager, steps: int) -> None:
    manager.save(SmallSession(), steps)
    manager.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_is_an_error_of_the_training_and_leaves_no_checkpoint(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """In the background it is raised by the next call: here the wait at the end."""
    manager = CheckpointManager(tmp_path, cell, CheckpointSection(every=1, background=background))
    first = manager.save(SmallSession(), 1)
    manager.close()
    refuse_writes(tmp_path, monkeypatch)
    with pytest.raises(CheckpointError, match=r"on rank 0: OSError: .*No space left on device.*; make room"):
        save_and_wait(manager, 2)
    assert list_checkpoints(tmp_path) == [first]
    assert (tmp_path / "latest").resolve() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", first.name], "no room is taken by what is incomplete"
    manager.close()  # raised once


@pytest.mark.parametrize("background", [False, True])
def test_the_training_says_that_it_waits_for_files_while_it_does(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Otherwise a slow disk would look like a rank that is stuck."""
    order, written = [], threading.Event()

    @contextmanager
    def waiting() -> Iterator[None]:
        order.append("begin")
        written.set()
        yield
        order.append("end")

    through = os.fsync

    def flush(descriptor: int) -> None:
        assert written.wait(60), "files are written before the training waits for them"
        if order[-1] == "begin":
            order.append("write")
        through(descriptor)

    manager = CheckpointManager(tmp_path, cell, CheckpointSection(every=1, background=background), waiting=waiting)
    monkeypatch.setattr(os, "fsync", flush)
    save_and_wait(manager, 1)
    assert order == ["begin", "write", "end"]


def test_a_failed_save_ends_the_training_at_the_next_step(tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path, cell, CheckpointSection(every=1000))
    refuse_writes(tmp_path, monkeypatch)
    manager.save(SmallSession(), 1)
    manager._task._thread.join()
    with pytest.raises(DataError, match="No space left"):
        manager.is_due(2, last=False)


def test_steps_during_a_background_save_do_not_change_what_is_saved(tmp_path: Path, cell: Cell) -> None:
    manager = CheckpointManager(tmp_path, cell, CheckpointSection(every=1))
    session, stream = SmallSession(), batches()
    session.step(stream)
    expected = session.optimizer.masters[0].clone()
    folder = manager.save(session, 1)
    for _ in range(20):
        session.step(stream)
    manager.close()
    assert torch.equal(saved_weight(folder), expected)
    assert not torch.equal(session.optimizer.masters[0], expected)


def test_a_checkpoint_of_another_configuration_is_refused(checkpoints: CheckpointManager, cell: Cell, tmp_path: Path) -> None:
    """Before anything in the session has changed."""
    folder = checkpoints.save(SmallSession(), 2)
    session = SmallSession(seed=1)
    before = weights(session)
    another = CheckpointManager(tmp_path / "checkpoints", replace(cell, batch=4), CheckpointSection(every=2, keep=2))
    with pytest.raises(ConfigurationError, match=r"batch is 2 there and 4 here \(2 samples per step there and 4 here\)"):
        another.restore(session, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())


def test_a_checkpoint_of_other_data_is_refused_and_one_that_states_none_is_not(tmp_path: Path, cell: Cell) -> None:
    def manager(episodes: int | None) -> CheckpointManager:
        digest: Any = {"dataset": "robots/a", "episodes": episodes}
        return CheckpointManager(
            tmp_path, cell, CheckpointSection(background=False), data=None if episodes is None else [digest]
        )

    stated, unstated = manager(100).save(SmallSession(), 2), manager(None).save(SmallSession(), 4)
    session = SmallSession(seed=1)
    before = weights(session)
    message = r"step-00000002: other data: robots/a: 100 episodes then, 101 now; resume with the data that it was trained on"
    with pytest.raises(ConfigurationError, match=message):
        manager(101).restore(session, stated)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())
    manager(100).restore(session, stated)
    manager(101).restore(session, unstated)


@pytest.mark.parametrize("with_all", [False, True])
def test_frozen_weights_that_another_device_drew_are_not_drawn_anew(
    tmp_path: Path, cell: Cell, with_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of GPUs is known by the state of their generator. Where nothing was frozen, it has all weights."""
    manager = CheckpointManager(tmp_path, cell, CheckpointSection(trainable_only=True, background=False))
    folder = manager.save(SmallSession(), 2)
    manager.restore(SmallSession(), folder)
    opened = TensorFolder.__init__

    def open_of_gpu(self: TensorFolder, path: Path) -> None:
        opened(self, path)
        left_out = () if with_all else ("weights/0.weight",)
        layout = {key: entry for key, entry in self.layout.items() if key not in left_out}
        self.layout = {**layout, "rng/0/cuda": layout["rng/0/cpu"]}

    monkeypatch.setattr(TensorFolder, "__init__", open_of_gpu)
    if with_all:
        manager.restore(SmallSession(), folder)
        return
    with pytest.raises(UnsupportedError, match="its frozen weights were drawn on cuda, are not in it, and are others on cpu"):
        manager.restore(SmallSession(), folder)


def test_a_checkpoint_of_another_policy_is_refused_by_the_weight_that_it_lacks(checkpoints: CheckpointManager) -> None:
    folder = checkpoints.save(SmallSession(), 2)
    session = SmallSession()
    session.model.register_buffer("extra", torch.zeros(1))
    with pytest.raises(DataError, match="has no tensor extra"):
        checkpoints.restore(session, folder)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("damage", ["cut off", "missing"])
def test_a_damaged_checkpoint_is_named_and_not_restored_in_part(checkpoints: CheckpointManager, name: str, damage: str) -> None:
    trained = SmallSession()
    trained.step(batches())
    folder = checkpoints.save(trained, 1)
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if damage == "cut off":
        (folder / name).write_bytes(content[: len(content) // 2])
    session = SmallSession(seed=1)
    before = weights(session)
    with pytest.raises(DataError, match=r"step-00000001: damaged checkpoint .*; remove it to resume from the previous one"):
        checkpoints.restore(session, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(session).items())


def kahan_adamw(parameters: list[torch.Tensor]) -> Optimizer:
    return KahanAdamW([{"params": parameters}], lr=1e-2)


def sgd_with_momentum(parameters: list[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def stepped_by(make: Callable[[list[torch.Tensor]], Optimizer], seed: int) -> SmallSession:
    """Return a session whose bfloat16 weights an optimizer steps directly."""
    session = SmallSession(seed=seed)
    optimizer = make(list(session.model.parameters()))
    session.backend.prepared = Prepared(session.model, optimizer, optimizer, build_schedule(optimizer, OPTIM))
    return session


def step_directly(session: SmallSession, numbers: range) -> None:
    for number in numbers:
        for parameter in session.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        session.backend.prepared.stepping.step()
        session.backend.prepared.schedule.step()


@pytest.mark.parametrize("make", [kahan_adamw, sgd_with_momentum])
def test_an_optimizer_that_counts_no_steps_of_its_parameters_is_restored_with_its_state(
    checkpoints: CheckpointManager, make: Callable[[list[torch.Tensor]], Optimizer]
) -> None:
    trained, resumed = stepped_by(make, seed=0), stepped_by(make, seed=1)
    step_directly(trained, range(3))
    checkpoints.restore(resumed, checkpoints.save(trained, 3))
    for session in (trained, resumed):
        step_directly(session, range(3, 6))
    assert all(torch.equal(weights(trained)[name], tensor) for name, tensor in weights(resumed).items())


def test_the_kernel_of_an_optimizer_is_chosen_where_it_runs(checkpoints: CheckpointManager) -> None:
    """A checkpoint from GPUs does not bring their kernel to CPUs, nor that of plain tensors to sharded ones."""
    trained, resumed = stepped_by(kahan_adamw, seed=0), stepped_by(kahan_adamw, seed=1)
    step_directly(trained, range(1))
    trained.backend.prepared.stepping.param_groups[0]["triton"] = True
    checkpoints.restore(resumed, checkpoints.save(trained, 1))
    assert resumed.backend.prepared.stepping.param_groups[0]["triton"] is False
