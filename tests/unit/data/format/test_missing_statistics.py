"""Statistics that a dataset does not store are computed once, exactly, and kept."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchbox.data import open_dataset
from benchbox.data.dataset.lerobot import open_training_dataset
from benchbox.data.format.missing_statistics import FILE
from benchbox.data.format.statistics import image_statistics
from benchbox.data.inspection import inspect
from benchbox.data.loading.loader import open_stream
from benchbox.spec.cell import DataSpec
from tests.support.datasets import LENGTHS, write_dataset
from tests.support.policy_batches import build


@pytest.fixture
def root(tmp_path):
    return write_dataset(tmp_path / "dataset", version="v2.1")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_single_pixel_is_the_darkest_or_the_brightest_level():
    histogram = np.zeros((3, 256), np.int64)
    histogram[:, [7, 100, 200]] = 1, 998, 1
    statistics = {name: np.ravel(values).tolist() for name, values in image_statistics(histogram, frames=4).items()}
    assert (statistics["min"], statistics["max"]) == ([7 / 255] * 3, [200 / 255] * 3)
    assert statistics["count"] == [4]


def test_missing_quantiles_are_those_of_all_frames_and_the_stored_statistics_stay(root):
    progress = []
    dataset, cached_in = open_training_dataset(root, lambda done, total: progress.append((done, total)))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert cached_in == root / FILE
    states = np.concatenate([dataset.column("observation.state", e.from_index, e.to_index) for e in dataset.episodes])
    stats = dataset.statistics["observation.state"]
    for name, q in {"q01": 0.01, "q10": 0.1, "q90": 0.9, "q99": 0.99}.items():
        np.testing.assert_allclose(stats[name], np.quantile(states.astype(np.float64), q, axis=0), rtol=1e-12)
    stored = open_dataset(root).statistics
    assert stored["observation.state"].items() <= stats.items()
    assert stored["timestamp"] == dataset.statistics["timestamp"]


def test_stored_statistics_of_a_part_of_the_episodes_are_computed_over_all(root):
    """Episodes that were added by other means than LeRobot's have none; those of the others are too narrow."""
    whole = open_training_dataset(root, cache=False)[0].statistics
    path = root / "meta/episodes_stats.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[1]["stats"]["action"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stored = open_dataset(root)
    assert "action" not in stored.statistics
    assert "observation.state" in stored.statistics
    report = inspect(stored)
    assert report.facts["stored statistics"] == (
        "meta/episodes_stats.jsonl has statistics of action of 2 of 3 episodes only, which are not used"
    )
    assert report.facts["statistics of action"].startswith("none; normalises by nothing; training computes")
    assert report.problems == []
    completed = open_training_dataset(root, cache=False)[0].statistics["action"]
    for name, values in whole["action"].items():
        np.testing.assert_allclose(completed[name], values, rtol=1e-6, err_msg=name)


def test_all_episodes_or_none_are_no_part_of_them(root):
    assert "stored statistics" not in inspect(open_dataset(root)).facts
    (root / "meta/episodes_stats.jsonl").unlink()
    assert "stored statistics" not in inspect(open_dataset(root)).facts


def test_they_are_computed_once_and_again_when_the_data_changed(root):
    first, _ = open_training_dataset(root)
    progress = []
    again, cached_in = open_training_dataset(root, lambda done, total: progress.append(done))
    assert not progress
    assert cached_in == root / FILE
    assert again.statistics == first.statistics
    file = root / "data/chunk-000/episode_000000.parquet"
    os.utime(file, ns=(0, 0))
    open_training_dataset(root, lambda done, total: progress.append(done))
    assert len(progress) == 3
    pq.write_table(pq.read_table(file), file, compression="none")  # another size at the same time
    os.utime(file, ns=(0, 0))
    open_training_dataset(root, lambda done, total: progress.append(done))
    assert len(progress) == 6


def test_those_of_a_dataset_that_cannot_be_written_are_cached_for_the_user(root, cache):
    (root / FILE).mkdir()  # root may write into any folder, so something else must be in the way
    _, cached_in = open_training_dataset(root)
    assert cached_in.parent == cache / "benchbox" / "statistics"
    progress = []
    assert open_training_dataset(root, lambda done, total: progress.append(done))[1] == cached_in
    assert not progress


def test_a_dataset_that_stores_all_of_them_is_not_read(dataset_root):
    progress = []
    dataset, cached_in = open_training_dataset(dataset_root, lambda done, total: progress.append(done))
    assert (progress, cached_in) == ([], None)
    assert dataset.statistics == json.loads((dataset_root / "meta/stats.json").read_text())


@pytest.mark.parametrize("damage", ["{", '{"fingerprint": "another", "statistics": {}}', "[]"])
def test_a_damaged_or_outdated_cache_is_replaced(root, damage):
    (root / FILE).write_text(damage)
    dataset, _ = open_training_dataset(root)
    assert len(dataset.statistics["action"]["q01"]) == 2


def test_a_policy_that_normalises_by_quantiles_trains_on_a_dataset_without_any(root):
    spec = build("pi05").batch_spec()
    assert spec.state_normalisation == "quantile"
    data = DataSpec(kind="lerobot", path=str(root), workers=0)
    stream = open_stream(data, spec, batch=2, accumulation=1, rank=0, world_size=1, seed=0)
    assert next(stream)["state"].shape[0] == 2
    (statistics,) = stream.statistics
    assert {"q01", "q99"} <= statistics["action"].keys()
    assert sum(LENGTHS) == json.loads((root / "meta/info.json").read_text())["total_frames"]
