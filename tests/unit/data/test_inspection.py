"""The inspection of a dataset lists its contents and its problems."""

import json
import shutil

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchbox.data import open_dataset
from benchbox.data.inspection import inspect
from benchbox.data.sample import sample_path
from benchbox.data.writing.convert import convert
from benchbox.spec.cell import DataSpec
from benchbox.spec.data_checks import camera_slots
from tests.support.datasets import annotate, copy_with_short_video, write_dataset


@pytest.fixture
def short_video(dataset_root, tmp_path):
    return copy_with_short_video(dataset_root, tmp_path / "short")


def test_it_names_frames_tasks_cameras_and_normalisations(dataset_root):
    facts = inspect(open_dataset(dataset_root)).facts
    assert facts["episodes"] == "3, of 1 to 20 frames"
    assert facts["frames"] == "34 at 10 frames/s, 3.4 s"
    assert facts["tasks"] == "push the red block (2 episodes); open the drawer (1 episodes)"
    assert facts["observation.images.wrist"].startswith("video 24 x 24 x 3")
    assert facts["statistics of action"].endswith("normalises by mean_std, min_max, quantile")


def test_subtasks_are_listed_and_one_that_is_not_there_is_a_problem(dataset_root, tmp_path):
    root = annotate(dataset_root, tmp_path / "annotated", {"subtask_index": [0] * 14 + [2] * 20}, ("reach", "push"))
    inspection = inspect(open_dataset(root))
    assert inspection.facts["subtasks"] == "reach; push"
    (problem,) = inspection.problems
    assert problem == f"{root}/meta/subtasks.parquet: no subtask 2, which frame 14 names"
    assert "subtasks" not in inspect(open_dataset(dataset_root)).facts


def test_a_video_shorter_than_its_table_is_a_problem_of_that_episode(short_video):
    (problem,) = inspect(open_dataset(short_video)).problems
    assert problem.startswith("episode 2: ")
    assert "observation.images.front/chunk-000/file-000.mp4: no frame at 3.300 s" in problem


def test_statistics_that_are_missing_are_no_problem_and_said_to_be_computed(dataset_root, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "bare")
    (root / "meta/stats.json").write_text(json.dumps({"action": {"min": [0, 0], "max": [1, 1]}}))
    inspection = inspect(open_dataset(root))
    assert inspection.problems == []
    assert (
        inspection.facts["statistics of observation.state"] == "none; normalises by nothing; training computes what is missing"
    )
    assert inspection.facts["statistics of action"] == "min, max; normalises by min_max; training computes what is missing"


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_rows_that_are_not_those_of_the_episode_table_are_a_problem(tmp_path, version):
    root = write_dataset(tmp_path / "shifted", version=version)
    for file in root.glob("data/*/*"):
        table = pq.read_table(file)
        column = table.column_names.index("index")
        pq.write_table(table.set_column(column, table.schema.field(column), pc.add(table["index"], 3)), file)
    problems = inspect(open_dataset(root)).problems
    assert len(problems) == 3
    if version == "v3.0":
        assert problems[1] == f"{file}: row 13 is frame 16, and episode 1 begins at frame 13"
    else:
        path = root / "data/chunk-000/episode_000001.parquet"
        assert problems[1] == f"{path}: row 0 is frame 16, and episode 1 begins at frame 13"


def copy_with_column(root, to, name, values):
    """Copy a dataset of one data file, with other values in one of its columns."""
    shutil.copytree(root, to)
    (file,) = (to / "data").rglob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(values)), file)
    return to


def test_a_task_that_is_not_there_is_a_problem_wherever_an_episode_names_it(dataset_root, tmp_path):
    root = copy_with_column(dataset_root, tmp_path / "copy", "task_index", [0] * 13 + [1] + [0] * 9 + [7] + [0] * 10)
    assert inspect(open_dataset(root)).problems == [f"{root}/meta/tasks.parquet: no task 7, which frame 23 names"]


def test_a_subtask_that_is_not_there_is_a_problem_wherever_an_episode_names_it(dataset_root, tmp_path):
    root = annotate(dataset_root, tmp_path / "annotated", {"subtask_index": [-1] * 20 + [2] * 14}, ("reach", "push"))
    assert inspect(open_dataset(root)).problems == [f"{root}/meta/subtasks.parquet: no subtask 2, which frame 20 names"]


def test_a_time_that_is_no_number_is_a_problem(dataset_root, tmp_path):
    times = [frame / 10 for frame in range(13)] + [0.0] + [frame / 10 for frame in range(20)]
    times[5] = float("nan")
    (problem,) = inspect(open_dataset(copy_with_column(dataset_root, tmp_path / "copy", "timestamp", times))).problems
    assert "row 5 is at nan s of episode 0" in problem


def test_totals_that_are_not_those_of_the_dataset_are_problems(dataset_root, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "copy")
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 5, "total_tasks": None}))
    assert inspect(open_dataset(root)).problems == [
        f"{path}: total_episodes is 5, and the dataset has 3; correct it",
        f"{path}: total_tasks is missing, and the dataset has 2; correct it",
    ]


def test_statistics_that_no_value_can_be_normalised_by_are_problems(dataset_root, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "copy")
    path = root / "meta/stats.json"
    stats = json.loads(path.read_text())
    stats["action"] |= {"q01": [0.0, float("nan")], "max": [1.0]}
    path.write_text(json.dumps(stats))
    assert inspect(open_dataset(root)).problems == [
        f"{path}, action: statistic 'max' has 1 values, and action 2",
        f"{path}, action: statistic 'q01' is nan in dimension 1, and no value can be normalised by it; recompute it",
    ]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_rows_of_no_episode_are_a_problem_of_their_file(tmp_path, version):
    """An interrupted recording may leave them, and lerobot takes the frames after them for others."""
    root = write_dataset(tmp_path / "longer", version=version)
    file = max(root.glob("data/*/*"))
    table = pq.read_table(file)
    rows = table.slice(len(table) - 1)
    rows = rows.set_column(rows.column_names.index("index"), "index", pc.add(rows["index"], 1))
    pq.write_table(pa.concat_tables([table, rows]), file)
    count = len(table)
    expected = f"{file}: has {count + 1} rows, and the episodes in it have {count} frames; remove the other rows"
    assert inspect(open_dataset(root)).problems == [expected]


def test_damage_that_several_episodes_share_is_one_problem(dataset_root, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "copy")
    (file,) = (root / "data").rglob("*.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["action"]), file)
    assert inspect(open_dataset(root)).problems == [f"{file}: no column 'action'"]


def test_the_size_of_images_is_not_compared_with_a_feature_named_like_the_camera(dataset_root, tmp_path):
    root = annotate(dataset_root, tmp_path / "annotated", {"front": [0] * 34})
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"features": {"front": info["features"]["front"]} | info["features"]}))
    assert inspect(open_dataset(root)).problems == []


@pytest.mark.parametrize("key", ["is_depth_map", "video.is_depth_map"])
def test_a_depth_map_is_no_camera_and_a_conversion_copies_it(dataset_root, tmp_path, key):
    root = shutil.copytree(dataset_root, tmp_path / "depth")
    path = root / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"]["observation.images.front"]["info"] = {key: True}
    path.write_text(json.dumps(info))
    assert camera_slots(DataSpec(kind="lerobot", path=str(root))) == 1
    assert convert(root, tmp_path / "v21", "v2.1").encoded == 0
    assert len(list((tmp_path / "v21").glob("videos/*/*.front/*.mp4"))) == 3
    for folder in (root, tmp_path / "v21"):
        dataset = open_dataset(folder)
        assert dataset.cameras == ("wrist",)
        inspection = inspect(dataset)
        assert inspection.facts["observation.images.front"].endswith("; a depth map, which policies do not read")
        assert inspection.problems == []


def test_the_shipped_sample_is_small_whole_and_has_four_cameras():
    ds = open_dataset(sample_path())
    inspection = inspect(ds)
    assert inspection.problems == []
    assert ds.cameras == ("corner", "corner2", "topview", "gripperPOV")
    assert len(ds.tasks) == 2
    assert sum(file.stat().st_size for file in sample_path().rglob("*") if file.is_file()) <= 2 * 10**6
    assert {"count", "q01", "q99"} <= set(ds.statistics["observation.state"])
