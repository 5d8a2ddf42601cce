"""A checkpoint that takes longer to write than ranks may make no progress."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchbox.registry.policies import policy_entry
from benchbox.store.checkpoints import list_checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

HANG_AFTER_S = 15  # a busy machine makes steps slow too
POLICY = f"""\
import os, time
from ..value.policy import build  # noqa: F401

flush, flushed = os.fsync, []

def slow(descriptor):
    if not flushed and "partial-step" in os.readlink(f"/proc/self/fd/{{descriptor}}"):
        flushed.append(descriptor)
        time.sleep({HANG_AFTER_S + 10})
    flush(descriptor)

os.fsync = slow
"""
TRAINING = f"""\
name: slow
policy: slow
size: tiny
backend: single
world_size: 1
batch: 1
recipe: fp32
data: synthetic
steps: 2
hang_after_s: {HANG_AFTER_S}
checkpoint: {{every: 2}}
"""


def test_it_is_waited_for_and_the_training_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "slow"
    folder.mkdir(parents=True)
    (folder / "policy.py").write_text(POLICY)
    shutil.copy(policy_entry("value").folder / "presets.yaml", folder)
    (tmp_path / "train.yaml").write_text(TRAINING)
    command = [sys.executable, "-m", "benchbox", "train", "train.yaml", "--policy-dir", "own", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in list_checkpoints(tmp_path / "out" / "checkpoints")] == ["step-00000002"]
