"""Sharded checkpoints, written by DeepSpeed and FSDP on real ranks, read back as facts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchbox.audit.judge import judge
from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from benchbox.launch.environment import host_variables

pytestmark = pytest.mark.ranks

SIDE = Path(__file__).parent / "checkpoint_side.py"
ELEMENTS = 16 * 32 + 32 + 32 * 8 + 8


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(SIDE), str(folder)]
    environment = {**os.environ, **host_variables(os.environ), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_float32_masters_and_state_of_every_rank(written: Path, stage: int) -> None:
    facts = read_checkpoint(written / f"zero{stage}")
    assert [(each.rank, each.world_size) for each in facts] == [(0, 2), (1, 2)]
    stepped = [tensor for each in facts for tensor in each.stepped]
    assert sum(tensor.elements for tensor in stepped) == pytest.approx(ELEMENTS, abs=16)  # partitions are padded
    assert {tensor.dtype for tensor in stepped} == {"float32"}
    assert {dtype for tensor in stepped for dtype in tensor.state.values()} == {"float32"}
    assert {(tensor.numbers.steps_before, tensor.betas) for tensor in stepped} == {(4, (0.9, 0.999))}
    names = {name for tensor in stepped for name in (tensor.covers or (tensor.name,))}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert judge(facts).findings == ()
    if stage < 3:  # ZeRO-3 saves no live weights beside its masters
        assert {tensor.numbers.live_differs for tensor in stepped} == {0.0}


def test_masters_that_were_copied_from_live_weights_are_found_in_their_checkpoint(written: Path) -> None:
    findings = judge(read_checkpoint(written / "zero2_derived")).findings
    assert {finding.code for finding in findings} == {"BXP501"}
    assert "1.weight" in json.dumps([finding.evidence for finding in findings])


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2"])
def test_a_distributed_checkpoint_shows_names_options_and_dtypes(written: Path, name: str) -> None:
    (facts,) = read_checkpoint(written / name)
    assert {tensor.name: tensor.elements for tensor in facts.stepped} == {
        "0.weight": 512,
        "0.bias": 32,
        "1.weight": 256,
        "1.bias": 8,
    }
    assert {(tensor.dtype, tensor.weight_decay, tensor.numbers.steps_before) for tensor in facts.stepped} == {
        ("float32", 0.25, 4)
    }
    moments = [entry for entry in facts.entries if entry.kind == "exp_avg_sq"]
    assert [(entry.dtype, entry.tensors, entry.elements) for entry in moments] == [("float32", 4, ELEMENTS)]
    assert judge([facts]).findings == ()


def test_a_missing_shard_is_one_line(written: Path) -> None:
    folder = written / "zero1" / "global_step4"
    lost = next(folder.glob("*rank_1*optim_states.pt"))
    lost.rename(lost.with_suffix(".away"))
    with pytest.raises(DataError, match="the optimizer states of rank 1 of 2 are missing"):
        read_checkpoint(written / "zero1")
    shard = next((written / "fsdp2").glob("__1_0.distcp"))
    shard.unlink()
    (written / "fsdp2" / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"__0_0\.distcp: No such file or directory"):
        read_checkpoint(written / "fsdp2")
