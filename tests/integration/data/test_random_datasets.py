"""Random datasets are read, described and converted without loss."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from benchbox.data import open_dataset
from benchbox.data.dataset.lerobot import open_training_dataset
from benchbox.data.inspection import inspect
from benchbox.data.writing.convert import convert
from tests.support.random_datasets import RandomDataset, write_random_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.data.dataset.lerobot import LeRobotDataset

pytestmark = pytest.mark.exhaustive

RENUMBERED = ("episode_index",)  # by a conversion


def assert_equal(dataset: LeRobotDataset, made: RandomDataset, skipped: tuple[str, ...] = ()) -> None:
    """Check every value of every frame, and images in random order."""
    assert inspect(dataset).problems == []
    for name, values in made.columns.items():
        if name in skipped:
            continue
        rows = np.concatenate([dataset.column(name, frames.start, frames.stop) for frames in made.frames])
        expected = values.reshape(len(values), -1)
        expected = expected.astype(np.float32) if name in ("observation.state", "action") else expected
        np.testing.assert_array_equal(rows, expected, err_msg=name)
    total = sum(made.lengths)
    assert [dataset.task(frame) for frame in range(total)] == made.tasks
    for camera, images in made.images.items():
        for frame in random.Random(0).sample(range(total), total):
            pixels = dataset.pixels(camera.removeprefix("observation.images."), frame)
            np.testing.assert_array_equal(pixels, images[frame], err_msg=f"{camera} {frame}")


@pytest.mark.parametrize("seed", range(36))
def test_a_random_dataset_is_read_as_it_was_written_and_converted_without_loss(tmp_path: Path, seed: int) -> None:
    made = write_random_dataset(tmp_path / "made", seed)
    assert_equal(open_dataset(made.root), made)
    dataset, _ = open_training_dataset(made.root)
    for name in ("observation.state", "action"):
        values = made.columns[name].astype(np.float32).astype(np.float64)
        for statistic, expected in (("std", values.std(0)), ("min", values.min(0)), ("q99", np.quantile(values, 0.99, axis=0))):
            np.testing.assert_allclose(dataset.statistics[name][statistic], expected, rtol=1e-9, atol=1e-9)
    version = "v2.1" if made.version == "v3.0" else "v3.0"
    if made.is_shared and made.images and made.fps % 1:
        return  # videos in one file may have to be encoded again, which other rates than whole numbers do not allow
    conversion = convert(made.root, tmp_path / "converted", version)
    if not conversion.encoded:
        assert_equal(open_dataset(tmp_path / "converted"), made, skipped=RENUMBERED)
