"""Fifty damaged datasets: training or the inspection names the file and what is wrong with it, in one line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.inspection import inspect
from benchbox.data.loading.loader import open_stream
from benchbox.data.video.files import VideoWriter
from benchbox.errors import BenchboxError
from benchbox.spec.cell import DataSpec
from tests.support.datasets import LENGTHS, copy_with_short_video, draw_index, write_dataset
from tests.support.policy_batches import build

FRAMES = sum(LENGTHS)
FRONT = "observation.images.front"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return {version: write_dataset(folder / version, version=version) for version in ("v3.0", "v2.1")}


@pytest.fixture(scope="module")
def spec():
    return build("pi05").batch_spec()


def table_of(root):
    return (
        next(root.glob("data/*/*")) if (root / "meta/stats.json").exists() else root / "data/chunk-000/episode_000002.parquet"
    )


def edit_table(change):
    def damage(root):
        path = table_of(root)
        pq.write_table(change(pq.read_table(path)), path)

    return damage


def with_column(name, change):
    def replaced(table):
        index = table.column_names.index(name)
        return table.set_column(index, name, change(table[name]))

    return edit_table(replaced)


def edit_episodes(change):
    def damage(root):
        path = root / "meta/episodes/chunk-000/file-000.parquet"
        rows = change(pq.read_table(path).to_pylist())
        pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(path)), path)

    return damage


def edit_episode_column(name, values):
    def damage(root):
        path = root / "meta/episodes/chunk-000/file-000.parquet"
        table = pq.read_table(path)
        pq.write_table(table.set_column(table.column_names.index(name), name, values), path)

    return damage


def edit_json(name, change):
    def damage(root):
        path = root / name
        value = json.loads(path.read_text())
        path.write_text(json.dumps(change(value) or value))

    return damage


def edit_lines(name, change):
    def damage(root):
        path = root / name
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        path.write_text("\n".join(map(json.dumps, rows)))

    return damage


def video_at(root, fps):
    writer = VideoWriter(root / f"videos/{FRONT}/chunk-000/file-000.mp4", fps=fps, height=32, width=48)
    for index in range(FRAMES):
        writer.add(np.ascontiguousarray(draw_index(index, 32, 48)), key_frame=index == 0)
    writer.close()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def set_value(rows, row, **values):
    rows[row].update(values)
    return rows


V30 = {
    "no info": (lambda r: (r / "meta/info.json").unlink(), "not a LeRobot dataset: meta/info.json is missing"),
    "info cut off": (lambda r: truncate(r / "meta/info.json"), r"info\.json: not readable as JSON"),
    "another version": (edit_json("meta/info.json", lambda v: v | {"codebase_version": "v1.6"}), "'v1.6'.*can be read"),
    "no fps": (edit_json("meta/info.json", lambda v: v | {"fps": None}), r"info\.json: fps is None"),
    "fps of 0": (edit_json("meta/info.json", lambda v: v | {"fps": 0}), r"info\.json: fps is 0"),
    "another fps": (
        edit_json("meta/info.json", lambda v: v | {"fps": 25}),
        r"parquet: row 1 is at 0\.1 s of episode 0, and at 25 fps, .*info\.json states, frame 1 is at 0\.04 s",
    ),
    "a video of another fps": (lambda r: video_at(r, 30), r"front.*file-000\.mp4: no frame at"),
    "another count of frames": (edit_json("meta/info.json", lambda v: v | {"total_frames": 9}), "total_frames is 9"),
    "no action": (edit_json("meta/info.json", lambda v: v["features"].pop("action") and None), "no feature 'action'"),
    "another width of state": (
        edit_json("meta/info.json", lambda v: v["features"]["observation.state"].update(shape=[4])),
        r"stats\.json, observation\.state: statistic 'q01' has 3 values, and observation\.state 4",
    ),
    "another shape of action, without statistics": (
        lambda r: (
            edit_json("meta/info.json", lambda v: v["features"]["action"].update(shape=[4]))(r),
            (r / "meta/stats.json").write_text("{}"),
        ),
        r"parquet: the values of 'action' do not have the shape \[4\]",
    ),
    "no tasks": (lambda r: (r / "meta/tasks.parquet").unlink(), r"tasks\.parquet: the file is missing"),
    "no episode tables": (lambda r: shutil.rmtree(r / "meta/episodes"), "episodes: the episode tables are missing"),
    "no episodes": (edit_episodes(lambda rows: []), "total_frames is 34, and the episodes hold 0"),
    "an episode missing": (edit_episodes(lambda rows: rows[::2]), "episode 2 does not follow the one before it"),
    "episodes that overlap": (
        edit_episodes(lambda rows: set_value(rows, 1, dataset_from_index=12)),
        "episode 1 does not follow the one before it",
    ),
    "an unknown task": (
        with_column("task_index", lambda c: pc.add(c, 7)),
        r"tasks\.parquet: no task [78], which frame \d+ names",
    ),
    "a table cut off": (lambda r: truncate(table_of(r)), r"file-000\.parquet: not readable as Parquet"),
    "no table": (lambda r: table_of(r).unlink(), r"file-000\.parquet: the file is missing"),
    "no timestamps": (edit_table(lambda t: t.drop_columns(["timestamp"])), r"file-000\.parquet: no column 'timestamp'"),
    "a table that ends early": (edit_table(lambda t: t.slice(0, 30)), "ends before frame 3[0-3], which episode 2 lists"),
    "rows missing": (
        edit_table(lambda t: pa.concat_tables([t.slice(0, 20), t.slice(22)])),
        "not consecutive frames: row 20 does not follow the one before it",
    ),
    "a missing value": (
        with_column("task_index", lambda c: pa.array([None if i == 5 else v for i, v in enumerate(c.to_pylist())])),
        "column 'task_index' has no value in row 5",
    ),
    "states that are not finite": (
        with_column(
            "observation.state",
            lambda c: pa.array([[np.nan] * 3 if i == 15 else v for i, v in enumerate(c.to_pylist())], c.type),
        ),
        r"parquet: observation\.state of episode 2 has values that are not finite: row 15",
    ),
    "statistics that are not finite": (
        edit_json("meta/stats.json", lambda v: v["action"].update(q01=[float("nan"), 0.0])),
        r"stats\.json, action: statistic 'q01' is nan in dimension 0",
    ),
    "statistics of another width": (
        edit_json("meta/stats.json", lambda v: v["action"].update(q01=[0.0] * 3)),
        "statistic 'q01' has 3 values, and action 2",
    ),
    "statistics without names": (
        edit_json("meta/stats.json", lambda v: v.update(action=[1])),
        r"stats\.json, action: holds \[1\]",
    ),
    "statistics cut off": (lambda r: truncate(r / "meta/stats.json"), r"stats\.json: not readable as JSON"),
    "a video cut off": (lambda r: truncate(next(r.glob("videos/*front/*/*"))), r"file-000\.mp4: not readable as video"),
    "no video": (lambda r: next(r.glob("videos/*front/*/*")).unlink(), r"file-000\.mp4: the video is missing"),
    "a shape of no sizes": (
        edit_json("meta/info.json", lambda v: v["features"]["action"].update(shape=[{"a": 1}])),
        r"info\.json: feature 'action': shape is \[\{'a': 1\}\], and a list of positive sizes is expected",
    ),
    "a feature without dtype": (
        edit_json("meta/info.json", lambda v: v["features"]["action"].pop("dtype") and None),
        r"info\.json: feature 'action': dtype is None, and a text is expected",
    ),
    "no times": (
        edit_json("meta/info.json", lambda v: v["features"].pop("timestamp") and None),
        r"info\.json: the dataset has no feature 'timestamp'",
    ),
    "a path of other fields": (
        edit_json("meta/info.json", lambda v: v.update(data_path="data/{episode}.parquet")),
        r"info\.json: data_path is 'data/\{episode\}.parquet', and a path with the fields \{chunk_index\}, \{file_index\}",
    ),
    "a file number that is none": (
        edit_episode_column("data/file_index", pa.array([[1], [2], [3]])),
        r"file-000\.parquet: row 0: data/file_index is \[1\], and a whole number from 0 on is expected",
    ),
    "a video time that is none": (
        edit_episode_column(f"videos/{FRONT}/from_timestamp", pa.array(["x"] * 3)),
        r"file-000\.parquet: row 0: videos/.*front/from_timestamp is 'x', and a time in seconds is expected",
    ),
    "tasks that are no texts": (
        lambda r: pq.write_table(pa.table({"task": [[1], [2]], "task_index": [0, 1]}), r / "meta/tasks.parquet"),
        r"tasks\.parquet: column 'task' holds list.*, and a text in every row is expected",
    ),
    "objects for numbers": (
        with_column("action", lambda c: pa.array([[{"a": 1}] * 2] * len(c))),
        r"file-000\.parquet: column 'action' holds list.* with other values than numbers",
    ),
    "fractions for indices": (
        with_column("task_index", lambda c: pa.array([0.5] * len(c))),
        r"file-000\.parquet: column 'task_index' holds double with other values than whole numbers",
    ),
    "times that are not finite": (
        with_column("timestamp", lambda c: pa.array([np.nan] * len(c), pa.float32())),
        r"file-000\.parquet: row \d+: timestamp is nan, and seconds are expected",
    ),
    "times before the video": (
        with_column("timestamp", lambda c: pa.array([-100.0] * len(c), pa.float32())),
        r"file-000\.parquet: row \d+: timestamp is -[\d.]+, and seconds are expected",
    ),
    "statistics of no feature": (
        edit_json("meta/stats.json", lambda v: v.update({"observation.state": -1})),
        r"stats\.json, observation\.state: holds -1",
    ),
    "videos of two cameras swapped": (
        lambda r: shutil.copyfile(next(r.glob("videos/*wrist/*/*")), next(r.glob("videos/*front/*/*"))),
        r"episode 0: .*front/chunk-000/file-000\.mp4: images of front are 24 x 24, and the shape in meta/info\.json is 32 x 48",
    ),
    "rows of another episode": (
        with_column("episode_index", lambda c: pc.add(c, 1)),
        r"file-000\.parquet: row 0: episode_index is 1, and 0 is expected",
    ),
    "frame numbers that start late": (
        with_column("frame_index", lambda c: pc.add(c, 1)),
        r"file-000\.parquet: row 0: frame_index is 1, and 0 is expected",
    ),
    "text for a video": (lambda r: next(r.glob("videos/*front/*/*")).write_text("text"), r"mp4: not readable as video"),
}
V21 = {
    "an episode without rows": (
        edit_table(lambda t: t.slice(0, 0)),
        r"episode_000002\.parquet: its rows are not consecutive frames: it has no rows",
    ),
    "tasks of an episode that are no list": (
        edit_lines("meta/episodes.jsonl", lambda rows: rows[1].update(tasks=3)),
        r"episodes\.jsonl: episode 1: tasks is 3, and a list of texts is expected",
    ),
    "statistics of an episode that are no numbers": (
        edit_lines("meta/episodes_stats.jsonl", lambda rows: rows[1]["stats"]["action"].update(mean=["a", "b"])),
        r"episodes_stats\.jsonl: episode 1: mean of action is \['a', 'b'\], and a list of numbers is expected",
    ),
    "statistics of episodes of other widths": (
        edit_lines("meta/episodes_stats.jsonl", lambda rows: rows[1]["stats"]["action"].update(mean=[0.0])),
        r"episodes_stats\.jsonl: the statistics of action cannot be combined .*; remove the file",
    ),
    "statistics of an episode that are NaN": (
        edit_lines("meta/episodes_stats.jsonl", lambda rows: rows[1]["stats"]["action"].update(min=[0.0, float("nan")])),
        r"episodes_stats\.jsonl, action: statistic 'min' is nan in dimension 1",
    ),
    "a line cut off": (lambda r: truncate(r / "meta/episodes.jsonl"), r"episodes\.jsonl:\d: not readable as JSON"),
    "a longer episode": (
        edit_lines("meta/episodes.jsonl", lambda rows: rows[0].update(length=14)),
        "total_frames is 34, and the episodes hold 35",
    ),
    "episodes of other lengths": (
        edit_lines("meta/episodes.jsonl", lambda rows: (rows[0].update(length=12), rows[2].update(length=21))),
        r"episode_000002\.parquet: ends before frame 33, which episode 2 lists",
    ),
    "an episode missing": (
        lambda r: (r / "data/chunk-000/episode_000001.parquet").unlink(),
        r"000001\.parquet: the file is missing",
    ),
    "a task missing": (
        edit_lines("meta/tasks.jsonl", lambda rows: rows.pop()),
        r"tasks\.jsonl: no task 1, which frame 13 names",
    ),
}
CASES = [("v3.0", name) for name in V30] + [("v2.1", name) for name in V21]


def complaints(root, spec):
    """Return the error of the first batches, or the problems that the inspection finds."""
    try:
        stream = open_stream(
            DataSpec(kind="lerobot", path=str(root), workers=0), spec, batch=2, accumulation=1, rank=0, world_size=1, seed=0
        )
        for _ in range(FRAMES // 2):
            next(stream)
    except BenchboxError as error:
        return [str(error)]
    return inspect(open_dataset(root)).problems


@pytest.mark.parametrize(("version", "name"), CASES)
def test_damage_is_one_line_that_names_the_file(roots, tmp_path, spec, version, name):
    root = shutil.copytree(roots[version], tmp_path / "copy")
    damage, says = {"v3.0": V30, "v2.1": V21}[version][name]
    damage(root)
    first, *_ = complaints(root, spec)
    assert str(root) in first
    assert "\n" not in first
    assert any(pc.match_substring_regex(pa.array([line]), says)[0].as_py() for line in complaints(root, spec)), first


def test_statistics_of_episodes_without_a_count_are_of_all_their_frames(roots, tmp_path):
    root = shutil.copytree(roots["v2.1"], tmp_path / "copy")
    edit_lines("meta/episodes_stats.jsonl", lambda rows: [row["stats"]["action"].pop("count") for row in rows])(root)
    assert open_dataset(root).statistics == open_dataset(roots["v2.1"]).statistics


def test_a_whole_dataset_has_no_complaints(roots, spec, tmp_path):
    assert [complaints(root, spec) for root in roots.values()] == [[], []]
    assert complaints(copy_with_short_video(roots["v3.0"], tmp_path / "short"), spec)
