"""Damaged, incomplete and foreign files: one line says what is wrong."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from tests.support.checkpoint_formats import (
    FORMATS,
    WEIGHTS,
    refusal_line,
    shard_file,
    zero,
    zero_model,
)


@pytest.mark.parametrize("content", [b"import torch\n", b"hello", b"readme", b"\x14\x95 noise", b""])
def test_a_file_that_is_no_checkpoint_is_called_that(tmp_path, content):
    path = tmp_path / "bad.py"
    path.write_bytes(content)
    if content:
        assert refusal_line(path) == f"{path}: not a checkpoint: neither safetensors nor a file of torch.save"
    assert "weights_only" not in refusal_line(path)


@pytest.mark.parametrize("write", FORMATS)
def test_a_file_that_ends_early_is_damaged(tmp_path, write):
    path = write(tmp_path, 1e-3)
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file() and file.name != "latest"]
    for file in files:
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            if file.suffix == ".safetensors" and size == 0:
                continue
            refusal_line(path)
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"only text"),
        ("picture.pt", b"\x89PNG\r\n"),
        ("empty.safetensors", b""),
        ("lies.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
        ("zip.pt", b"PK\x05\x06" + bytes(18)),
    ],
)
def test_foreign_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refusal_line(tmp_path / name)


@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}, {"loss": torch.tensor(1.0)}, {"rng": torch.get_rng_state()}])
def test_a_file_without_weights_and_optimizer_says_so(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    assert refusal_line(tmp_path / "a.pt").endswith("holds neither the tensors of a model nor the state of an optimizer")


def test_a_folder_without_a_checkpoint_says_what_is_there(tmp_path):
    assert "the folder is empty" in refusal_line(tmp_path)
    (tmp_path / "step-00000100").mkdir()
    assert "folders: step-00000100" in refusal_line(tmp_path)
    assert "no such file or directory" in refusal_line(tmp_path / "nowhere")


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal_line(tmp_path / "pipe").endswith("neither a file nor a folder")


def test_a_missing_rank_of_zero_is_named(tmp_path):
    zero(tmp_path, None)
    model = tmp_path / "global_step1" / zero_model()
    torch.save(torch.load(model) | {"dp_world_size": 3}, model)
    with pytest.raises(DataError, match="the optimizer states of rank 1, 2 of 3 are missing"):
        read_checkpoint(tmp_path)
    model.unlink()
    with pytest.raises(DataError, match=r"holds no \*_model_states.pt"):
        read_checkpoint(tmp_path)


def test_a_missing_part_of_a_model_is_named(tmp_path):
    save_file(WEIGHTS, tmp_path / "model-00001-of-00002.safetensors")
    index = '{"weight_map": {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "names model-00002-of-00002.safetensors, which is not there" in refusal_line(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shard_file(tmp_path, 1e-3)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"__0_0.distcp: is missing"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["[]", "null", '{"weight_map": [1]}', '{"weight_map": null}'])
def test_an_index_without_files_is_named(tmp_path, index):
    save_file(WEIGHTS, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DataError, match=r"index\.json: is no index of weights"):
        read_checkpoint(tmp_path)


def test_a_distributed_checkpoint_whose_save_did_not_end_is_called_that(tmp_path):
    """torch writes the metadata last."""
    shard_file(tmp_path, 1e-3)
    content = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"\.metadata: damaged \(pickle data was truncated"):
        read_checkpoint(tmp_path)
    (tmp_path / ".metadata").unlink()
    assert "no .metadata, which is written last: the save did not end" in refusal_line(tmp_path)


def test_a_pickled_model_is_advised_to_be_saved_as_its_state(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    assert refusal_line(tmp_path / "model.pt").endswith("save their state_dict()")


def test_a_link_to_a_missing_file_is_named(tmp_path):
    """In a cache of downloads, names are links to files that may have been removed."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert refusal_line(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: is a link to a file that is missing")
