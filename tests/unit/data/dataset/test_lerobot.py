"""The reader returns what the writer stored: every value exactly, and the right frame."""

import json
import pickle
import random
import shutil
from fractions import Fraction

import av
import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from benchbox.data import LeRobotWriter, open_dataset
from benchbox.data.dataset.lerobot import LeRobotDataset, open_training_dataset
from benchbox.data.inspection import inspect
from benchbox.data.video.decoders import installed_decoders
from benchbox.data.writing.convert import convert
from benchbox.errors import DataError
from tests.support.datasets import FEATURES, LENGTHS, TASKS, blank_frame, draw_index, read_index, split_data, write_dataset

FRAMES = sum(LENGTHS)


@pytest.fixture
def broken(dataset_root, tmp_path):
    """A copy of the dataset to damage."""
    return shutil.copytree(dataset_root, tmp_path / "copy")


def test_it_counts_frames_and_names_what_it_holds(dataset_root):
    ds = open_dataset(dataset_root)
    assert len(ds) == FRAMES
    assert ds.fps == 10
    assert ds.cameras == ("front", "wrist")
    assert ds.tasks == ("push the red block", "open the drawer")
    assert [(e.index, e.from_index, e.to_index, e.length, e.tasks) for e in ds.episodes] == [
        (0, 0, 13, 13, (TASKS[0],)),
        (1, 13, 14, 1, (TASKS[1],)),
        (2, 14, 34, 20, (TASKS[0],)),
    ]


def test_an_item_has_the_documented_keys_types_and_shapes(dataset_root):
    item = open_dataset(dataset_root)[15]
    tensors = {name: (tuple(v.shape), v.dtype) for name, v in item.items() if isinstance(v, torch.Tensor)}
    assert tensors == {
        "observation.state": ((3,), torch.float32),
        "action": ((2,), torch.float32),
        "observation.images.front": ((3, 32, 48), torch.uint8),
        "observation.images.wrist": ((3, 24, 24), torch.uint8),
    }
    assert item["episode_index"] == 2
    assert item["frame_index"] == 1
    assert item["timestamp"] == pytest.approx(0.1)
    assert item["task"] == "push the red block"


def test_values_come_back_exactly(dataset_root):
    ds = open_dataset(dataset_root)
    rng = np.random.default_rng(0)
    for index, item in enumerate(ds):
        assert torch.equal(item["observation.state"], torch.from_numpy(rng.normal(size=3).astype(np.float32)))
        assert torch.equal(item["action"], torch.tensor([index / 10, -index / 10]))


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_every_frame_is_the_right_one_in_any_order(dataset_root, order):
    ds = open_dataset(dataset_root)
    indices = list(range(FRAMES))
    if order == "backwards":
        indices.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(indices)
    assert [read_index(ds.image(camera, i)) for i in indices for camera in ds.cameras] == [
        i for i in indices for _ in ds.cameras
    ]


def test_noise_survives_the_video_within_its_loss(tmp_path):
    """Lossy by design: smooth images come back within a few grey levels."""
    ramp = np.linspace(0, 255, 48 * 32).reshape(32, 48)
    image = np.stack([ramp, ramp[::-1], np.full_like(ramp, 90)], -1).astype(np.uint8)
    features = {name: FEATURES[name] for name in ("observation.state", "action", "observation.images.front")}
    with LeRobotWriter(tmp_path / "ramp", fps=5, features=features, robot_type="test") as writer:
        for _ in range(4):
            frame = {"observation.state": np.zeros(3), "action": np.zeros(2), "observation.images.front": image}
            writer.add_frame(frame, task="look")
        writer.save_episode()
    decoded = open_dataset(tmp_path / "ramp").image("front", 3).permute(1, 2, 0).numpy()
    assert np.abs(decoded.astype(int) - image).mean() < 8


def test_only_what_is_asked_for_is_decoded(broken):
    shutil.rmtree(broken / "videos/observation.images.wrist")
    ds = open_dataset(broken)
    assert read_index(ds.image("front", 5)) == 5
    with pytest.raises(DataError, match=r"observation\.images\.wrist.*missing"):
        ds[5]


def test_an_item_may_be_changed_without_changing_the_dataset(dataset_root):
    ds = open_dataset(dataset_root)
    before = ds[3]["action"].clone()
    ds[3]["action"].zero_()
    assert torch.equal(ds[3]["action"], before)


def test_a_pickled_dataset_opens_its_files_anew(dataset_root):
    ds = open_dataset(dataset_root)
    ds.image("wrist", 0)
    assert read_index(pickle.loads(pickle.dumps(ds)).image("wrist", 21)) == 21


def test_large_datasets_go_on_in_further_files(tmp_path):
    root = write_dataset(tmp_path / "many", lengths=(9,) * 4, tasks=("go",) * 4, data_file_mib=0, video_file_mib=0)
    assert len(list(root.glob("data/*/*.parquet"))) == 4
    assert len(list(root.glob("videos/observation.images.front/*/*.mp4"))) == 4
    ds = open_dataset(root)
    assert [read_index(ds.image("front", i)) for i in (0, 8, 9, 35)] == [0, 8, 9, 35]
    assert torch.equal(ds[35]["action"], torch.tensor([3.5, -3.5]))


# Data files as convert_dataset_v21_to_v30 of lerobot 0.4.4 writes them: their episodes by number, and the file listed for each.
CONVERTED = {
    "the first episode of a file under the file before it": ({0: (0, 1), 1: (2, 3), 2: (4, 5)}, (0, 0, 0, 1, 1, 2)),
    "a last file under which no episode is listed": ({0: (0, 1), 1: (2, 3, 4), 2: (5,)}, (0, 0, 0, 1, 1, 1)),
    "episodes larger than a file, and a first file that was never written": (
        {number + 1: (number,) for number in range(6)},
        tuple(range(6)),
    ),
}


@pytest.fixture(params=CONVERTED)
def converted(request, tmp_path):
    """A dataset as lerobot 0.4.4 converts it, whose episode table names the wrong data files, and which lacks statistics."""
    whole = write_dataset(tmp_path / "whole", lengths=(5, 3, 4, 6, 2, 7), tasks=tuple("abcdef"))
    (whole / "meta/stats.json").unlink()
    return split_data(whole, tmp_path / "converted", *CONVERTED[request.param])


def test_episodes_that_lerobot_lists_under_the_wrong_data_file_are_read_right(converted, tmp_path):
    order = [*range(27), 26, 0, 12, 8]
    for root in (converted, tmp_path / "v21"):
        ds = open_dataset(root)
        assert [round(10 * float(ds[index]["action"][0])) for index in order] == order
        assert [read_index(ds.image("front", index)) for index in order] == order
        assert [ds.task(episode.from_index) for episode in ds.episodes] == [*"abcdef"]
        assert inspect(ds).problems == []
        if root == converted:
            convert(root, tmp_path / "v21", "v2.1")


def test_statistics_are_of_data_files_that_no_episode_is_listed_under_too(converted):
    statistics = open_training_dataset(converted)[0].statistics["action"]
    assert (statistics["count"], statistics["max"]) == ([27], [pytest.approx(2.6), 0])
    last = max(converted.glob("data/*/*.parquet"))
    table = pq.read_table(last)
    actions = pa.array([[5.0, 0.0]] * len(table), table.schema.field("action").type)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", actions), last)
    assert open_training_dataset(converted)[0].statistics["action"]["max"] == [5, 0]


def test_episodes_that_no_data_file_has_are_one_line_with_the_file_the_row_and_a_remedy(tmp_path):
    whole = write_dataset(tmp_path / "whole", lengths=(5, 3, 4), tasks=tuple("abc"))
    root = split_data(whole, tmp_path / "without_the_second", {0: (0,), 1: (2,)}, (0, 0, 1))
    ds = open_dataset(root)
    assert [round(10 * float(ds[index]["action"][0])) for index in (0, 4, 8, 11)] == [0, 4, 8, 11]
    with pytest.raises(DataError) as caught:
        ds[5]
    assert str(caught.value) == (
        f"{root}/data/chunk-000/file-000.parquet: it has 5 rows, and meta/episodes lists episode 1 from row 5 and frame 5 on, "
        "which no data file has; restore the data files, or convert the dataset anew"
    )


# Files of 10 frames/s: how late the first frame is, and options of the container and of the encoder.
LATE = {
    "a frame": (1, {}, {"bf": "0"}),
    "three frames, in a file of reordered frames": (3, {}, {"bf": "2"}),
    "the reordering of frames, without an edit list": (0, {"use_editlist": "0", "movflags": "faststart"}, {"bf": "2"}),
}


def encode_late(path, *, frames, start, container, encoder, size=(32, 48)):
    """Encode images of the frames 0, 1, ... as H.264, the first of them at `start` tenths of a second."""
    with av.open(str(path), "w", options=container) as output:
        stream = output.add_stream("libx264", rate=10, options={"g": "8", **encoder})
        (stream.height, stream.width), stream.pix_fmt = size, "yuv420p"
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(draw_index(index, *size), format="rgb24")
            frame.pts, frame.time_base = index + start, Fraction(1, 10)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("decoder", installed_decoders())
def test_a_video_that_begins_late_is_one_line_that_names_the_file_the_time_and_a_remedy(broken, tmp_path, name, decoder):
    start, container, encoder = LATE[name]
    (path,) = broken.glob("videos/*front/*/*")
    encode_late(path, frames=FRAMES, start=start, container=container, encoder=encoder)
    start_s = {"a frame": 0.1, "three frames, in a file of reordered frames": 0.3}.get(name, 0.2)
    says = (
        f"{path}: the video begins at {start_s:.3f} s, and its first frame in the dataset is at 0.000 s: all frames would be "
        "shifted; encode the video again with the first frame at that time"
    )
    ds = LeRobotDataset(open_dataset(broken).metadata, decoder)
    for index in (20, 0):  # frame 20 would be one that is earlier
        with pytest.raises(DataError) as caught:
            ds.image("front", index)
        assert str(caught.value) == says
    assert str(path) not in [file.path for file in psutil.Process().open_files()]
    assert read_index(ds.image("wrist", 20)) == 20
    with pytest.raises(DataError) as caught:
        convert(broken, tmp_path / "v21", "v2.1")
    assert str(caught.value) == says


@pytest.mark.parametrize("decoder", installed_decoders())
def test_a_video_may_begin_where_its_first_episode_does(broken, decoder):
    """Times of episodes in v3.0 are those of the file, whenever it begins."""
    (path,) = broken.glob("videos/*front/*/*")
    encode_late(path, frames=FRAMES, start=3, container={}, encoder={"bf": "2"})
    episodes = broken / "meta/episodes/chunk-000/file-000.parquet"
    table, name = pq.read_table(episodes), "videos/observation.images.front/from_timestamp"
    times = pc.add(table[name], 0.3)
    pq.write_table(table.set_column(table.column_names.index(name), name, times), episodes)
    ds = LeRobotDataset(open_dataset(broken).metadata, decoder)
    assert [read_index(ds.image("front", index)) for index in (20, *range(FRAMES))] == [20, *range(FRAMES)]


def test_the_files_are_those_of_the_v30_layout(dataset_root):
    info = json.loads((dataset_root / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, FRAMES, 2)
    assert {"total_videos", "total_chunks"}.isdisjoint(info)
    assert pd.read_parquet(dataset_root / "meta/tasks.parquet").loc["open the drawer", "task_index"] == 1
    rows = pq.read_table(dataset_root / "data/chunk-000/file-000.parquet")
    kinds = {name: str(rows.schema.field(name).type) for name in ("timestamp", "frame_index", "index", "task_index")}
    assert kinds == {"timestamp": "float", "frame_index": "int64", "index": "int64", "task_index": "int64"}
    episodes = pq.read_table(dataset_root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert episodes[2]["videos/observation.images.wrist/from_timestamp"] == pytest.approx(1.4)
    assert episodes[2]["videos/observation.images.wrist/to_timestamp"] == pytest.approx(3.4)
    assert episodes[2]["stats/action/count"] == [20]


def test_statistics_are_those_of_every_frame(dataset_root):
    ds = open_dataset(dataset_root)
    states = np.stack([item["observation.state"].numpy() for item in ds]).astype(np.float64)
    stats = ds.statistics["observation.state"]
    assert stats["count"] == [FRAMES]
    for name, expected in {
        "mean": states.mean(0),
        "std": states.std(0),
        "min": states.min(0),
        "max": states.max(0),
        "q01": np.quantile(states, 0.01, axis=0),
        "q99": np.quantile(states, 0.99, axis=0),
    }.items():
        np.testing.assert_allclose(stats[name], expected, rtol=1e-9)
    image = ds.statistics["observation.images.front"]
    ones = sum(i.bit_count() for i in range(FRAMES)) / (8 * FRAMES)  # the share of white bars
    assert np.shape(image["mean"]) == (3, 1, 1)
    assert image["mean"][0][0][0] == pytest.approx(ones)
    assert image["std"][2][0][0] == pytest.approx((ones * (1 - ones)) ** 0.5)
    assert (image["min"][0][0][0], image["q50"][0][0][0], image["max"][0][0][0]) == (0, 0, 1)


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit_info(root, **values):
    path = root / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGE = {
    "no info": (lambda root: (root / "meta/info.json").unlink(), "not a LeRobot dataset"),
    "info is not JSON": (lambda root: (root / "meta/info.json").write_text("{"), r"info\.json: not readable as JSON"),
    "another version": (lambda root: _edit_info(root, codebase_version="v1.6"), "'v1.6'.*v3.0 can be read"),
    "another count": (lambda root: _edit_info(root, total_frames=9), "total_frames is 9, and the episodes hold 34"),
    "no features": (lambda root: _edit_info(root, features=None), r"info\.json: features are None"),
    "no action": (lambda root: _edit_info(root, features={"observation.state": {"dtype": "float32"}}), "no feature 'action'"),
    "no tasks": (lambda root: (root / "meta/tasks.parquet").unlink(), r"tasks\.parquet: the file is missing"),
    "no episodes": (lambda root: shutil.rmtree(root / "meta/episodes"), "episode tables are missing"),
    "table cut off": (lambda root: _truncate(next(root.glob("data/*/*"))), r"file-000\.parquet: not readable as Parquet"),
    "video cut off": (lambda root: _truncate(next(root.glob("videos/*front/*/*"))), r"file-000\.mp4: not readable as video"),
    "no video": (lambda root: next(root.glob("videos/*front/*/*")).unlink(), r"file-000\.mp4: the video is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_that_names_the_file(broken, name):
    damage, says = DAMAGE[name]
    damage(broken)
    with pytest.raises(DataError, match=says) as caught:
        open_dataset(broken)[0]
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such dataset folder"):
        open_dataset(tmp_path / "nowhere")


@pytest.mark.parametrize("index", [-1, FRAMES])
def test_a_frame_that_does_not_exist_is_refused(dataset_root, index):
    with pytest.raises(DataError, match=f"no frame {index}; the dataset has {FRAMES}"):
        open_dataset(dataset_root)[index]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"action": np.zeros(5)}, r"action: a value of shape \(5,\) for a feature of shape \(2,\)"),
        ({"observation.images.front": np.zeros((32, 48, 3))}, "images are uint8, not float64"),
        ({"odd": 1}, "missing or unknown: odd"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_and_the_recording_goes_on(tmp_path, change, says):
    good = blank_frame()
    with LeRobotWriter(tmp_path / "new", fps=10, features=FEATURES, robot_type="test") as writer:
        writer.add_frame(good, task="t")
        with pytest.raises(DataError, match=says):
            writer.add_frame(good | change, task="t")
        writer.add_frame(good, task="t")
        writer.save_episode()
    assert open_dataset(tmp_path / "new")[1]["frame_index"] == 1


@pytest.mark.parametrize(
    ("feature", "says"),
    [
        ({"dtype": "video", "shape": [31, 48, 3]}, "even sizes"),
        ({"dtype": "float32", "shape": [2, 2]}, "one dimension"),
        ({"dtype": "complex64", "shape": [2]}, "cannot store complex64"),
    ],
)
def test_features_that_cannot_be_stored_are_refused(tmp_path, feature, says):
    with pytest.raises(DataError, match=says):
        LeRobotWriter(tmp_path / "new", fps=10, features=FEATURES | {"more": feature}, robot_type="test")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_to(dataset_root):
    with pytest.raises(DataError, match="exists already"):
        LeRobotWriter(dataset_root, fps=10, features=FEATURES, robot_type="test")


def test_a_recording_that_raises_leaves_nothing(tmp_path):
    def interrupted():
        with LeRobotWriter(tmp_path / "new", fps=10, features=FEATURES, robot_type="test") as writer:
            writer.add_frame(blank_frame(), task="t")
            writer.save_episode()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("leave", ["nothing", "an open episode"])
def test_closing_without_a_whole_recording_is_refused_and_leaves_nothing(tmp_path, leave):
    writer = LeRobotWriter(tmp_path / "new", fps=10, features=FEATURES, robot_type="test")
    if leave == "an open episode":
        writer.add_frame(blank_frame(), task="t")
    with pytest.raises(DataError, match=r"nothing was recorded|neither saved nor discarded"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
