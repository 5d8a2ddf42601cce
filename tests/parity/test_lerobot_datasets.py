"""Datasets that lerobot wrote read as lerobot reads them, and those that benchbox wrote load in lerobot with equal values."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchbox.data import open_dataset
from benchbox.data.inspection import inspect
from benchbox.data.sample import sample_path
from benchbox.data.writing.convert import convert
from tests.parity.lerobot import ENVIRONMENT, V21_ENVIRONMENT, V30_ENVIRONMENT, requires_lerobot, run_script
from tests.support.datasets import read_index, write_dataset

ENVIRONMENTS = [("v3.0", ENVIRONMENT), ("v3.0", V30_ENVIRONMENT), ("v2.1", V21_ENVIRONMENT)]
EPISODES = [(13, "push"), (5, "open"), (20, "push")]
CASES = [
    pytest.param(
        version,
        environment,
        images,
        id=f"{environment.requirements.stem}-{images}",
        marks=pytest.mark.skipif(
            not environment.is_built,
            reason=f"no environment {environment.requirements.stem} in build/parity: `make parity` builds it",
        ),
    )
    for version, environment in ENVIRONMENTS
    for images in ("video", "image")
]


def lerobot_version(environment):
    return next(pin.replace("==", " ") for pin in environment.pinned_packages if pin.startswith("lerobot=="))


def read_by_lerobot(folder, environment, *, fps, decode):
    (folder / "options.json").write_text(json.dumps({"fps": fps, "decode": decode}))
    run_script("read_dataset", folder, environment)
    return load_file(folder / "frames.safetensors"), json.loads((folder / "content.json").read_text())


def assert_equal_windows(parity, name, dataset, frames, content):
    """Compare every value of every frame, with the windows around it and their padding."""
    ours = {key: [] for key in ("observation.state", "action", "action_is_pad", "observation.state_is_pad")}
    for index in range(len(dataset)):
        episode = dataset.episode_of(index)
        history, future = np.arange(index - 1, index + 1), np.arange(index, index + 4)
        for key, window in (("observation.state", history), ("action", future)):
            start, stop = episode.from_index, episode.to_index
            rows = dataset.column(key, start, stop)[window.clip(start, stop - 1) - start]
            ours[key].append(torch.from_numpy(rows))
            ours[f"{key}_is_pad"].append(torch.from_numpy((window < start) | (window >= stop)))
    for key, rows in ours.items():
        parity.compare("data", name, key, torch.stack(rows).float(), frames[key].float(), bound=0.0)
    for key in ("episode_index", "frame_index", "timestamp", "index", "task_index"):
        columns = torch.cat([torch.from_numpy(dataset.column(key, e.from_index, e.to_index)[:, 0]) for e in dataset.episodes])
        assert torch.equal(columns, frames[key]), key
    assert [dataset.task(index) for index in range(len(dataset))] == content["tasks"]
    assert len(dataset.episodes) == content["episodes"]


def assert_equal_statistics(ours, theirs):
    for name, stats in theirs.items():
        for key, values in stats.items():
            np.testing.assert_allclose(
                np.ravel(ours[name][key]), np.ravel(values), rtol=1e-6, atol=1e-9, err_msg=f"{name} {key}"
            )


@pytest.mark.parametrize(("version", "environment", "images"), CASES)
def test_a_dataset_that_lerobot_wrote_reads_as_lerobot_reads_it(parity, tmp_path, version, environment, images):
    (tmp_path / "options.json").write_text(json.dumps({"images": images, "episodes": EPISODES}))
    run_script("write_dataset", tmp_path, environment)
    dataset = open_dataset(tmp_path / "dataset")
    assert dataset.info["codebase_version"] == version
    frames, content = read_by_lerobot(tmp_path, environment, fps=10, decode=images == "image")
    name = f"{lerobot_version(environment)} ({version}, {images}s)"
    assert_equal_windows(parity, name, dataset, frames, content)
    assert_equal_statistics(dataset.statistics, content["statistics"])
    pictures = [dataset.image("front", index) for index in range(len(dataset))]
    if images == "image":
        theirs = frames["observation.images.front"]
        parity.compare("data", name, "images", torch.stack(pictures).float() / 255, theirs, bound=0.0)
    assert [read_index(picture) for picture in pictures] == list(range(sum(length for length, _ in EPISODES)))


@pytest.mark.parametrize(("version", "environment", "images"), [case for case in CASES if case.values[2] == "video"])
def test_a_dataset_that_benchbox_wrote_loads_in_lerobot_with_equal_values(parity, tmp_path, version, environment, images):
    dataset = open_dataset(write_dataset(tmp_path / "dataset", version=version))
    frames, content = read_by_lerobot(tmp_path, environment, fps=10, decode=False)
    assert_equal_windows(parity, f"{lerobot_version(environment)} reading {version} of benchbox", dataset, frames, content)
    assert_equal_statistics(dataset.statistics, content["statistics"])


@pytest.mark.parametrize(
    ("version", "environment", "images"), [case for case in CASES if (case.values[0], case.values[2]) == ("v2.1", "video")]
)
def test_a_converted_dataset_loads_in_lerobot_with_equal_values(parity, tmp_path, version, environment, images):
    convert(sample_path(), tmp_path / "dataset", version)
    frames, content = read_by_lerobot(tmp_path, environment, fps=40, decode=False)
    assert_equal_windows(
        parity, f"{lerobot_version(environment)} reading {version} converted", open_dataset(sample_path()), frames, content
    )


@requires_lerobot
@pytest.mark.parametrize(("version", "environment", "images"), [case for case in CASES if case.values[0] == "v2.1"])
def test_a_dataset_of_the_newest_lerobot_converted_to_v21_loads_in_lerobot(parity, tmp_path, version, environment, images):
    (tmp_path / "options.json").write_text(json.dumps({"images": images, "episodes": EPISODES}))
    run_script("write_dataset", tmp_path)
    newest = open_dataset((tmp_path / "dataset").rename(tmp_path / "newest"))
    convert(newest.root, tmp_path / "dataset", version)
    frames, content = read_by_lerobot(tmp_path, environment, fps=10, decode=images == "image")
    name = f"{lerobot_version(environment)} reading {version} converted from lerobot's {images}s"
    assert_equal_windows(parity, name, newest, frames, content)


@requires_lerobot
def test_annotations_that_lerobot_wrote_are_the_texts_that_it_renders(tmp_path):
    """Subtasks, memories, plans and events, some beginning at a frame, one between frames, one not before its episode."""
    (tmp_path / "options.json").write_text(json.dumps({"images": "image", "episodes": EPISODES}))
    run_script("write_dataset", tmp_path)
    rows = {
        "0": [("subtask", 0.0, "reach"), ("subtask", 0.7, "grasp"), ("plan", 0.0, "first this"), ("memory", 0.7, "reached")],
        "2": [("memory", 0.25, "a"), ("memory", 1.1, "b"), ("subtask", 0.3, "lift"), ("vqa", 0.5, "?")],
    }
    (tmp_path / "annotations.json").write_text(json.dumps(rows))
    run_script("annotate_dataset", tmp_path)
    rendered = json.loads((tmp_path / "rendered.json").read_text())
    dataset = open_dataset(tmp_path / "dataset")
    frames = range(sum(length for length, _ in EPISODES))
    assert [dataset.text("response", frame) for frame in frames] == [row["subtask"] for row in rendered]
    assert [dataset.text("memory", frame) for frame in frames] == [row["memory"] for row in rendered]
    assert [dataset.task(frame) for frame in frames] == [row["task"] for row in rendered]
    assert {row["subtask"] for row in rendered} == {"", "reach", "grasp", "lift"}
    assert {row["memory"] for row in rendered} == {"", "reached", "a", "b"}
    assert inspect(dataset).facts["language_events"] == "1 vqa"
