"""Datasets of every version read the same: frames, tasks, images and statistics."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.errors import DataError
from tests.support.datasets import LENGTHS, TASKS, draw_index, encode_image, read_index, write_dataset

FRAMES = sum(LENGTHS)


@pytest.fixture(scope="module")
def v21(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("v21") / "dataset", version="v2.1")


@pytest.fixture(scope="module")
def v20(v21, tmp_path_factory):
    """A v2.0 copy of it, with one file of statistics for all episodes."""
    root = shutil.copytree(v21, tmp_path_factory.mktemp("v20") / "dataset")
    info = json.loads((root / "meta/info.json").read_text()) | {"codebase_version": "v2.0"}
    (root / "meta/info.json").write_text(json.dumps(info))
    stats = open_dataset(v21).statistics
    kept = ("mean", "std", "min", "max")
    (root / "meta/stats.json").write_text(json.dumps({name: {key: s[key] for key in kept} for name, s in stats.items()}))
    (root / "meta/episodes_stats.jsonl").unlink()
    return root


@pytest.mark.parametrize("version", ["v20", "v21"])
def test_a_dataset_of_files_per_episode_reads_as_one_of_shared_files(version, dataset_root, request):
    root = request.getfixturevalue(version)
    assert sorted(path.name for path in root.glob("data/chunk-000/*")) == [f"episode_00000{i}.parquet" for i in range(3)]
    ours, theirs = open_dataset(root), open_dataset(dataset_root)
    assert len(ours) == FRAMES
    assert ours.tasks == theirs.tasks == tuple(dict.fromkeys(TASKS))
    for index in (0, 12, 13, 14, 33):
        for name, value in theirs[index].items():
            if not name.startswith("observation.images"):  # encoded anew: compared below
                assert np.array_equal(ours[index][name], value), (index, name)
    assert np.array_equal(ours.column("action", 14, FRAMES), theirs.column("action", 14, FRAMES))
    assert [read_index(ours.image(camera, i)) for i in range(FRAMES) for camera in ours.cameras] == [
        i for i in range(FRAMES) for _ in ours.cameras
    ]


@pytest.mark.parametrize("version", ["v20", "v21"])
def test_statistics_of_episodes_combine_to_those_of_all_frames(version, dataset_root, request):
    ours, theirs = open_dataset(request.getfixturevalue(version)).statistics, open_dataset(dataset_root).statistics
    for name in ("observation.state", "action", "observation.images.front", "timestamp"):
        for statistic in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(ours[name][statistic], theirs[name][statistic], rtol=1e-9, atol=1e-12)
        assert "q01" not in ours[name], "quantiles of parts say nothing about those of the whole"


def test_a_v21_dataset_has_the_metadata_lerobot_writes(v21):
    info = json.loads((v21 / "meta/info.json").read_text())
    expected = {"codebase_version": "v2.1", "total_videos": 6, "total_chunks": 1, "chunks_size": 1000, "total_episodes": 3}
    assert expected.items() <= info.items()
    assert "data_files_size_in_mb" not in info
    assert [json.loads(line) for line in (v21 / "meta/episodes.jsonl").read_text().splitlines()][1] == {
        "episode_index": 1,
        "tasks": [TASKS[1]],
        "length": 1,
    }
    assert (v21 / "videos/chunk-000/observation.images.front/episode_000002.mp4").is_file()


def test_episodes_are_in_chunks_of_the_size_that_info_states(v21, tmp_path):
    root = shutil.copytree(v21, tmp_path / "chunks")
    info = json.loads((root / "meta/info.json").read_text()) | {"chunks_size": 2}
    (root / "meta/info.json").write_text(json.dumps(info))
    for folder in ("data/chunk-00{}", *(f"videos/chunk-00{{}}/observation.images.{name}" for name in ("front", "wrist"))):
        (root / folder.format(1)).mkdir(parents=True)
        (last,) = (root / folder.format(0)).glob("episode_000002.*")
        last.rename(root / folder.format(1) / last.name)
    assert read_index(open_dataset(root).image("front", 33)) == 33


def test_tasks_may_hold_any_line_break_of_unicode(v21, tmp_path):
    """LeRobot does not escape U+0085, U+2028 and U+2029 in JSON Lines, at which `str.splitlines` divides."""
    root = shutil.copytree(v21, tmp_path / "copy")
    texts = ["one\u2028two\u2029three", "one\x85two"]
    rows = [json.dumps({"task_index": number, "task": text}, ensure_ascii=False) for number, text in enumerate(texts)]
    (root / "meta/tasks.jsonl").write_text("\r\n".join(rows), encoding="utf-8")
    assert open_dataset(root).tasks == tuple(texts)


DAMAGE = {
    "an episode without frames": (
        lambda root: (root / "meta/episodes.jsonl").write_text('{"episode_index": 4, "tasks": [], "length": 0}\n'),
        r"meta/episodes\.jsonl: episode 4 has no frames",
    ),
    "no episodes": (lambda root: (root / "meta/episodes.jsonl").unlink(), r"episodes\.jsonl: the file is missing"),
    "a line cut off": (
        lambda root: (root / "meta/tasks.jsonl").write_text('{"task_index": 0}\n{"ta'),
        r"tasks\.jsonl:2: not read",
    ),
    "a line of text": (lambda root: (root / "meta/tasks.jsonl").write_text("3\n"), r"tasks\.jsonl:1: expected a JSON object"),
    "a column twice": (
        lambda root: pq.write_table(
            pa.table([[0], [0]], names=["index", "index"]), root / "data/chunk-000/episode_000001.parquet"
        ),
        r"000001\.parquet: 2 columns are named 'index'; keep one of them",
    ),
    "an episode missing": (
        lambda root: (root / "data/chunk-000/episode_000001.parquet").unlink(),
        "000001.parquet: the file is",
    ),
    "a video missing": (
        lambda root: (root / "videos/chunk-000/observation.images.wrist/episode_000001.mp4").unlink(),
        r"wrist/episode_000001\.mp4: the video is missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_of_files_per_episode_is_one_line_that_names_the_file(v21, tmp_path, name):
    root = shutil.copytree(v21, tmp_path / "copy")
    damage, says = DAMAGE[name]
    damage(root)
    with pytest.raises(DataError, match=says) as caught:
        open_dataset(root)[13]
    assert "\n" not in str(caught.value)


@pytest.fixture(params=["png", "mjpeg", "file"])
def with_images(request, v21, tmp_path):
    """The dataset with its front camera in the tables, as PNG or JPEG, or in files that the tables name."""
    root = shutil.copytree(v21, tmp_path / "images")
    shutil.rmtree(root / "videos/chunk-000/observation.images.front")
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["observation.images.front"]["dtype"] = "image"
    (root / "meta/info.json").write_text(json.dumps(info))
    for path in (root / "data/chunk-000").iterdir():
        table = pq.read_table(path)
        cells = []
        for index in table.column("index").to_pylist():
            encoded = encode_image(draw_index(index, 32, 48), "png" if request.param == "file" else request.param)
            if request.param == "file":
                (root / f"frame_{index}.png").write_bytes(encoded)
            cells.append({"bytes": None if request.param == "file" else encoded, "path": f"frame_{index}.png"})
        column = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        pq.write_table(table.append_column("observation.images.front", column), path, row_group_size=4)
    return root


def test_images_in_tables_read_like_those_in_videos(with_images):
    dataset = open_dataset(with_images)
    assert dataset.cameras == ("front", "wrist")
    order = [*range(FRAMES), 3, 30, 0]
    assert [read_index(dataset.image("front", index)) for index in order] == order
    assert dataset.image("front", 5).shape == (3, 32, 48)
    assert dataset.image("front", 5).dtype == torch.uint8


def test_a_damaged_image_names_file_row_and_camera(with_images):
    path = with_images / "data/chunk-000/episode_000002.parquet"
    table = pq.read_table(path)
    cells = [{"bytes": b"no image", "path": ""} if row == 7 else cell for row, cell in enumerate(table[-1].to_pylist())]
    column = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    pq.write_table(table.set_column(table.num_columns - 1, "observation.images.front", column), path)
    dataset = open_dataset(with_images)
    dataset.image("front", 14 + 6)
    with pytest.raises(DataError, match=r"episode_000002\.parquet: row 7, observation\.images\.front: not an image"):
        dataset.image("front", 14 + 7)
