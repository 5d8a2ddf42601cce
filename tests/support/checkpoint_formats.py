"""Small checkpoints of every format that the audit reads, with any value in them, and the line that refuses one."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as dcp

from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import EXIT_USAGE, DataError

WEIGHTS = {"weight": torch.ones(2, 2)}
EMPTY_OPTIMIZER = {"state": {}, "param_groups": []}


def torch_file(folder, value):
    torch.save({"model": WEIGHTS, "extra": value}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def old_torch_file(folder, value):
    torch.save({"model": WEIGHTS, "extra": value}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def bare_pickle(folder, value):
    (folder / "checkpoint.bin").write_bytes(pickle.dumps({"model": 1, "extra": value}))
    return folder / "checkpoint.bin"


def accelerate(folder, value):
    save_file(WEIGHTS, folder / "model.safetensors")
    torch.save(EMPTY_OPTIMIZER | {"extra": value}, folder / "optimizer.bin")
    return folder


def zero(folder, value):
    (folder / "latest").write_text("global_step1")
    step = folder / "global_step1"
    step.mkdir()
    torch.save({"module": WEIGHTS, "param_shapes": [{"weight": torch.Size([2, 2])}], "dp_world_size": 1}, step / zero_model())
    states = {"base_optimizer_state": EMPTY_OPTIMIZER, "single_partition_of_fp32_groups": [], "loss_scaler": value}
    torch.save({"optimizer_state_dict": states}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def zero_model():
    return "mp_rank_00_model_states.pt"


def metadata_file(folder, value):
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(state_dict_metadata={}, planner_data=value)))
    return folder


def shard_file(folder, value):
    """Write harmless metadata, and a shard that is a program."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    location = _StorageInfo("__0_0.distcp", 0, len(stream.getvalue()))
    key = "optimizer.param_groups.0.lr"
    metadata = dcp.Metadata(
        state_dict_metadata={key: dcp.BytesStorageMetadata()},
        planner_data={key: ("optimizer", "param_groups", 0, "lr")},
        storage_data={dcp.MetadataIndex(key): location},
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


FORMATS = [torch_file, old_torch_file, bare_pickle, accelerate, zero, metadata_file, shard_file]


def refusal_line(path):
    """Return the one line that a checkpoint is refused with."""
    with pytest.raises(DataError) as refusal:
        read_checkpoint(path)
    line = str(refusal.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert refusal.value.exit_code == EXIT_USAGE
    return line
