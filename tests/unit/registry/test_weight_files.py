"""The files of a path of weights, and the messages about those that cannot be read."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchbox.errors import DataError
from benchbox.registry.weights import LoadedWeights, weight_files, weights_text

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path):
    """Two of them, without an index."""
    for name in ("b", "a"):
        save_file({name: np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    return tmp_path


def test_a_path_is_a_file_a_folder_or_an_index(shards):
    a, b, single = (shards / f"{name}.safetensors" for name in ("a", "b", "model"))
    assert weight_files(a) == [a]
    assert weight_files(shards) == [a, b]
    save_file({"w": np.zeros(3)}, single)
    assert weight_files(shards) == [single]
    (shards / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}))
    assert weight_files(shards) == weight_files(shards / INDEX) == [a, b]


def shortened(folder):
    file = folder / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return file


def pickled(folder):
    file = folder / "pytorch_model.bin"
    file.write_bytes(pickle.dumps({"a": [0.0]}))
    return file


def index(text):
    def write(folder):
        (folder / INDEX).write_text(text)
        return folder

    return write


def only_pickled(folder):
    (folder / "inner").mkdir()
    pickled(folder / "inner")
    return folder / "inner"


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda folder: folder / "c.safetensors", "c.safetensors: there is no such file"),
        (lambda folder: folder / "c.json", "c.json: there is no such file"),
        (only_pickled, "inner: there are no safetensors files in it"),
        (shortened, "a.safetensors: not a whole safetensors file (Error while deserializing header"),
        (pickled, "pytorch_model.bin: not a whole safetensors file (Error while deserializing header"),
        (index('{"weight_map": {"x": "c.safetensors"}}'), "c.safetensors: there is no such file"),
        (index('{"weight'), f"{INDEX}: not an index of safetensors files (JSONDecodeError"),
        (index("[]"), f"{INDEX}: not an index of safetensors files (TypeError"),
    ],
)
def test_what_cannot_be_read_is_named_in_a_line(shards, damage, line):
    with pytest.raises(DataError) as caught:
        weight_files(damage(shards))
    assert f"/{line}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_names_parameters_of_all_layers_once():
    names = tuple(f"layers.{layer}.{part}.weight" for layer in range(12) for part in ("key", "value"))
    recorded = LoadedWeights(
        loaded=names, missing=names, unexpected=("lm_head.weight",), fitted={"position": "resized"}
    ).to_dict()
    assert recorded == {
        "loaded": 24,
        "missing": ["layers.*.key.weight", "layers.*.value.weight"],
        "unexpected": ["lm_head.weight"],
        "fitted": {"position": "resized"},
    }
    assert weights_text(recorded) == (
        "24 parameters; not in it: layers.*.key.weight, layers.*.value.weight; not taken: lm_head.weight; position: resized"
    )
    assert weights_text(None) is None
