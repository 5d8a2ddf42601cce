"""A training that is killed while it saves leaves a checkpoint that loads, whenever the kill comes."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING, NoReturn

import torch

from benchbox.spec.train import CheckpointSection
from benchbox.store.checkpoints import checkpoint_steps, damage_of, list_checkpoints, set_damaged_aside
from benchbox.trainer.checkpoint import CheckpointManager
from tests.support.small_session import SmallSession, batches

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.spec.cell import Cell

KILLS = {False: 16, True: 50}  # by whether exhaustive tests run


def train_for_ever(folder: Path, cell: Cell, progress: int, *, background: bool) -> NoReturn:
    """Continue from the newest checkpoint, and save after every step; write a byte to `progress` before every save."""
    manager = CheckpointManager(folder, cell, CheckpointSection(every=1, keep=2, background=background))
    session, steps = SmallSession(), 0
    if existing := list_checkpoints(folder):
        steps = checkpoint_steps(existing[-1])
        manager.restore(session, existing[-1])
    stream = batches(steps)
    while True:
        session.step(stream)
        steps += 1
        os.write(progress, b"s")
        manager.save(session, steps)


def kill_a_training(folder: Path, cell: Cell, moment: float, *, background: bool) -> None:
    """Kill a training in its second or third save, after `moment` of the time that the save before it took."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            train_for_ever(folder, cell, writing, background=background)
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1), "the training could not continue from what the killed one had left"
    started = time.monotonic()
    assert os.read(reading, 1)
    time.sleep(moment * (time.monotonic() - started))
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, "it failed before it was killed"


def test_latest_loads_after_a_kill_at_any_moment_of_saving(tmp_path: Path, cell: Cell, exhaustive: bool) -> None:
    """Kills at random moments, of savings in the foreground and in the background. Each training continues the one before
    it, so nobody has to clean up in between."""
    torch.set_num_threads(1)
    moments = random.Random(0)
    interrupted, steps, kills = 0, 0, KILLS[exhaustive]
    for number in range(kills):
        kill_a_training(tmp_path, cell, moments.uniform(0, 2), background=number % 2 == 1)
        interrupted += any(path.name.startswith(".") for path in tmp_path.iterdir())
        checkpoints = list_checkpoints(tmp_path)
        assert set_damaged_aside(tmp_path) == [], number
        assert [damage_of(path) for path in checkpoints] == [None] * len(checkpoints)
        if checkpoints:
            latest = (tmp_path / "latest").resolve(strict=True)
            assert latest in checkpoints, "it is one of the complete ones"
            session = SmallSession(seed=1)
            CheckpointManager(tmp_path, cell, CheckpointSection()).restore(session, latest)
            assert checkpoint_steps(checkpoints[-1]) >= steps, "no kill loses a checkpoint"
            steps = checkpoint_steps(checkpoints[-1])
    assert steps > kills // 2, "the trainings came forward"
    assert interrupted > kills // 2, "most kills came in the middle of a checkpoint"
