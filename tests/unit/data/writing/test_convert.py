"""Conversion between versions keeps every value and every frame."""

from __future__ import annotations

import json
import shutil
import stat

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.data.sample import sample_path
from benchbox.data.video.files import VideoWriter
from benchbox.data.writing.attempts import FILE, SuccessRate, read_success_rates
from benchbox.data.writing.convert import convert
from benchbox.errors import DataError
from benchbox.store.files import write_json
from tests.support.datasets import LENGTHS, annotate, draw_index, encode_image, read_index, write_dataset


@pytest.fixture(scope="module")
def there_and_back(tmp_path_factory):
    """The shipped v3.0 dataset, its conversion to v2.1, and that one's to v3.0."""
    folder = tmp_path_factory.mktemp("converted")
    progress = []
    assert convert(sample_path(), folder / "v21", "v2.1", lambda *done: progress.append(done)).encoded == 0
    assert progress[0] == (1, 12)
    assert progress[-1] == (12, 12)
    assert convert(folder / "v21", folder / "v30", "v3.0").encoded == 0
    return [open_dataset(path) for path in (sample_path(), folder / "v21", folder / "v30")]


def test_frames_are_the_same_to_the_last_bit(there_and_back):
    original, v21, v30 = there_and_back
    for index in range(0, len(original), 9):
        frame = original[index]
        for converted in (v21, v30):
            for name, value in converted[index].items():
                assert np.array_equal(value, frame[name]), (converted.info["codebase_version"], index, name)
    for episode in original.episodes:
        for name in ("episode_index", "index", "frame_index", "task_index"):
            columns = [d.column(name, episode.from_index, episode.to_index) for d in there_and_back]
            assert np.array_equal(columns[0], columns[1])
            assert np.array_equal(columns[0], columns[2])


def test_statistics_of_the_dataset_and_of_its_episodes_stay(there_and_back):
    original, v21, v30 = there_and_back
    assert v21.statistics.keys() == v30.statistics.keys() == original.statistics.keys()
    for name, stats in original.statistics.items():
        for key in stats if name in ("observation.state", "action") else ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(v30.statistics[name][key], stats[key], rtol=1e-6, err_msg=f"{name} {key}")
    rows = [pq.read_table(dataset.root / "meta/episodes/chunk-000/file-000.parquet").to_pylist() for dataset in (original, v30)]
    for name in ("stats/action/q01", "stats/observation.images.corner/mean", "length", "dataset_to_index", "tasks"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]


def test_info_and_tables_have_the_types_they_had(there_and_back):
    original, v21, v30 = there_and_back
    assert v30.info == original.info
    assert stat.S_IMODE(v30.root.stat().st_mode) == 0o755, "others can read it"
    assert v21.info["features"] == original.info["features"]
    schemas = [pq.read_schema(dataset.episodes[0].data_file) for dataset in there_and_back]
    assert schemas[0].equals(schemas[1])
    assert schemas[0].equals(schemas[2])


def test_texts_and_subtasks_come_along(tmp_path, dataset_root):
    frames = sum(LENGTHS)
    columns = {"memory": [f"note {i}" for i in range(frames)], "subtask_index": [i % 2 for i in range(frames)]}
    source = annotate(dataset_root, tmp_path / "annotated", columns, ("reach", "lift"))
    convert(source, tmp_path / "v21", "v2.1")
    convert(tmp_path / "v21", tmp_path / "v30", "v3.0")
    for name in ("v21", "v30"):
        dataset = open_dataset(tmp_path / name)
        assert [dataset.text("memory", i) for i in (0, 20)] == ["note 0", "note 20"]
        assert [dataset.text("response", i) for i in (2, 33)] == ["reach", "lift"]


def test_an_episode_that_does_not_begin_with_a_key_frame_is_encoded_again(tmp_path):
    source = write_dataset(tmp_path / "source")
    path = source / "videos/observation.images.front/chunk-000/file-000.mp4"
    writer = VideoWriter(path, fps=10, height=32, width=48)
    for index in range(sum(LENGTHS)):
        writer.add(np.ascontiguousarray(draw_index(index, 32, 48)), key_frame=index == 0)
    writer.close()
    conversion = convert(source, tmp_path / "v21", "v2.1")
    assert (conversion.copied, conversion.encoded) == (4, 2), "episodes 1 and 2 of that camera"
    dataset = open_dataset(tmp_path / "v21")
    order = range(sum(LENGTHS))
    assert [read_index(dataset.image("front", index)) for index in order] == list(order)


def test_videos_of_another_codec_begin_a_file_of_their_own(tmp_path):
    source = write_dataset(tmp_path / "source", version="v2.1")
    with av.open(str(source / "videos/chunk-000/observation.images.front/episode_000001.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        image = np.ascontiguousarray(draw_index(13, 32, 48))
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")), *stream.encode(None)])
    conversion = convert(source, tmp_path / "v30", "v3.0")
    assert conversion.encoded == 0
    dataset = open_dataset(tmp_path / "v30")
    assert [read_index(dataset.image("front", index)) for index in range(sum(LENGTHS))] == list(range(sum(LENGTHS)))
    assert [episode.videos["observation.images.front"].path.name for episode in dataset.episodes] == [
        f"file-00{number}.mp4" for number in range(3)
    ]


def test_an_episode_too_short_for_reordered_frames_may_be_before_one_that_has_them(tmp_path):
    lengths = (12, 1, 9, 2, 8)
    source = write_dataset(tmp_path / "source", lengths=lengths, tasks=["push"] * len(lengths), version="v2.1")
    frames = iter(range(sum(lengths)))
    for path, length in zip(sorted(source.glob("videos/*/*.front/*")), lengths, strict=True):
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=10, options={"bf": "2", "b-adapt": "0", "threads": "1"})
            stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
            for _ in range(length):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(draw_index(next(frames), 32, 48), format="rgb24")))
            container.mux(stream.encode(None))
    assert convert(source, tmp_path / "v30", "v3.0").encoded == 0
    dataset = open_dataset(tmp_path / "v30")
    assert [read_index(dataset.image("front", index)) for index in range(sum(lengths))] == list(range(sum(lengths)))


def test_a_video_that_lacks_a_frame_is_not_copied(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "short")
    writer = VideoWriter(source / "videos/observation.images.front/chunk-000/file-000.mp4", fps=10, height=32, width=48)
    for index in range(sum(LENGTHS) - 5):
        writer.add(np.ascontiguousarray(draw_index(index, 32, 48)), key_frame=index in (0, 13, 14))
    writer.close()
    with pytest.raises(DataError, match=r"file-000\.mp4: no frame at 2\.900 s"):
        convert(source, tmp_path / "v21", "v2.1")


def test_statistics_that_no_episode_has_are_computed_from_its_frames(tmp_path):
    source = write_dataset(tmp_path / "source", version="v2.1")
    expected = json.loads((source / "meta/episodes_stats.jsonl").read_text().splitlines()[2])["stats"]
    (source / "meta/episodes_stats.jsonl").unlink()
    convert(source, tmp_path / "v30", "v3.0")
    row = pq.read_table(tmp_path / "v30/meta/episodes/chunk-000/file-000.parquet").to_pylist()[2]
    np.testing.assert_allclose(row["stats/action/q99"], expected["action"]["q99"])
    front = "observation.images.front"
    np.testing.assert_allclose(row[f"stats/{front}/mean"], expected[front]["mean"], atol=0.02)  # decoded, not drawn
    assert row[f"stats/{front}/count"] == [20]


def test_statistics_of_episodes_that_readers_cannot_combine_are_computed_too(tmp_path):
    source = write_dataset(tmp_path / "source")
    path = source / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["stats/action/mean", "stats/observation.state/count"]), path)
    convert(source, tmp_path / "v21", "v2.1")
    expected, stats = (open_dataset(root).statistics["action"] for root in (source, tmp_path / "v21"))
    np.testing.assert_allclose(stats["mean"], expected["mean"], rtol=1e-6)
    rows = (tmp_path / "v21/meta/episodes_stats.jsonl").read_text().splitlines()
    assert all(json.loads(row)["stats"]["observation.state"]["count"] for row in rows)


def test_statistics_of_features_with_several_dimensions_are_computed(dataset_root, tmp_path):
    """LeRobot stores them as lists of lists."""
    source = shutil.copytree(dataset_root, tmp_path / "source")
    (file,) = source.glob("data/*/*")
    values = np.arange(6.0 * sum(LENGTHS)).reshape(-1, 2, 3)
    pq.write_table(pq.read_table(file).append_column("contact", pa.array(values.tolist())), file)
    info = json.loads((source / "meta/info.json").read_text())
    info["features"]["contact"] = {"dtype": "float64", "shape": [2, 3], "names": None}
    (source / "meta/info.json").write_text(json.dumps(info))
    convert(source, tmp_path / "v21", "v2.1")
    assert open_dataset(tmp_path / "v21").statistics["contact"]["max"] == values[-1].tolist()
    assert pq.read_table(tmp_path / "v21/data/chunk-000/episode_000001.parquet")["contact"].to_pylist() == [values[13].tolist()]


def test_totals_that_were_wrong_are_counted(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    info = json.loads((source / "meta/info.json").read_text())
    (source / "meta/info.json").write_text(json.dumps(info | {"total_episodes": 7, "total_tasks": 0}))
    convert(source, tmp_path / "v21", "v2.1")
    assert open_dataset(tmp_path / "v21").info["total_episodes"] == len(LENGTHS)
    assert open_dataset(tmp_path / "v21").info["total_tasks"] == 2


@pytest.mark.parametrize(
    ("version", "says"), [("v3.0", "is a dataset of v3.0 already"), ("v2.0", "no dataset is written as 'v2.0'; v3.0 or v2.1")]
)
def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(dataset_root, tmp_path, version, says):
    with pytest.raises(DataError, match=says):
        convert(dataset_root, tmp_path / "new", version)
    assert not list(tmp_path.iterdir())


def test_images_in_files_of_their_own_come_along_in_the_tables(tmp_path):
    source = write_dataset(tmp_path / "source", version="v2.1")
    shutil.rmtree(source / "videos/chunk-000/observation.images.front")
    info = json.loads((source / "meta/info.json").read_text())
    info["features"]["observation.images.front"]["dtype"] = "image"
    (source / "meta/info.json").write_text(json.dumps(info))
    for path in (source / "data/chunk-000").iterdir():
        table = pq.read_table(path)
        cells = [{"bytes": None, "path": f"frame_{index}.png"} for index in table["index"].to_pylist()]
        column = pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
        pq.write_table(table.append_column("observation.images.front", column), path)
    for index in range(sum(LENGTHS)):
        (source / f"frame_{index}.png").write_bytes(encode_image(draw_index(index, 32, 48)))
    convert(source, tmp_path / "v30", "v3.0")
    dataset = open_dataset(tmp_path / "v30")
    assert [read_index(dataset.image("front", index)) for index in range(sum(LENGTHS))] == list(range(sum(LENGTHS)))
    (source / "frame_20.png").unlink()
    with pytest.raises(DataError, match=r"episode_000002\.parquet: row 6 names an image that cannot be read"):
        convert(source, tmp_path / "again", "v3.0")


@pytest.mark.parametrize("images", [(), ("observation.images.front",)])
def test_tables_of_v21_say_which_columns_are_images_and_nothing_that_their_readers_do_not_know(dataset_root, tmp_path, images):
    """Lists of LeRobot 0.4 and later are of a type that `datasets` has since version 4, and LeRobot of v2.1 uses version 3."""
    source = shutil.copytree(dataset_root, tmp_path / "source")
    (file,) = source.glob("data/*/*")
    table = pq.read_table(file)
    action = {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "List"}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": {"action": action}}})})
    info = json.loads((source / "meta/info.json").read_text())
    for name in images:
        cells = [{"bytes": encode_image(draw_index(index, 32, 48)), "path": "frame.png"} for index in range(len(table))]
        table = table.append_column(name, pa.array(cells, pa.struct({"bytes": pa.binary(), "path": pa.string()})))
        info["features"][name]["dtype"] = "image"
    pq.write_table(table, file)
    (source / "meta/info.json").write_text(json.dumps(info))
    convert(source, tmp_path / "v21", "v2.1")
    metadata = pq.read_schema(tmp_path / "v21/data/chunk-000/episode_000002.parquet").metadata or {}
    features = json.loads(metadata.get(b"huggingface", b'{"info": {"features": {}}}'))["info"]["features"]
    assert features == {name: {"_type": "Image"} for name in images}


def test_a_rate_that_is_no_whole_number_is_copied_and_never_encoded_again(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    path = source / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fps": 10.01}))
    assert convert(source, tmp_path / "copied", "v2.1").encoded == 0
    writer = VideoWriter(source / "videos/observation.images.front/chunk-000/file-000.mp4", fps=10, height=32, width=48)
    for index in range(sum(LENGTHS)):
        writer.add(np.ascontiguousarray(draw_index(index, 32, 48)), key_frame=index == 0)
    writer.close()
    with pytest.raises(DataError, match=r"must be encoded again, which 10\.01 frames per second do not allow"):
        convert(source, tmp_path / "encoded", "v2.1")


@pytest.mark.parametrize(
    ("pattern", "says"), [("data/*/*", "not readable as Parquet"), ("videos/*wrist/*/*", "not readable as")]
)
def test_a_file_cut_off_is_one_line(dataset_root, tmp_path, pattern, says):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    (path,) = source.glob(pattern)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=says) as caught:
        convert(source, tmp_path / "new", "v2.1")
    assert str(path) in str(caught.value)
    assert [folder.name for folder in tmp_path.iterdir()] == ["source"]


def test_a_table_that_ends_before_its_last_episode_is_one_line(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    (path,) = source.glob("data/*/*")
    table = pq.read_table(path)
    pq.write_table(table.slice(0, len(table) - 2), path)
    with pytest.raises(DataError, match=rf"ends before frame {len(table) - 1}, which episode {len(LENGTHS) - 1} lists"):
        convert(source, tmp_path / "new", "v2.1")


def test_the_success_rates_of_a_recording_come_along(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    write_json(source / FILE, {"arguments": {}, "tasks": [{"env": "push-v3", "attempts": 3, "solved": 2}]})
    convert(source, tmp_path / "new", "v2.1")
    assert read_success_rates(tmp_path / "new") == [SuccessRate(env="push-v3", attempts=3, solved=2)]


def test_a_damaged_dataset_leaves_nothing_behind(dataset_root, tmp_path):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    next(source.glob("videos/*wrist/*/*")).unlink()
    with pytest.raises(DataError, match=r"file-000\.mp4: the video is missing"):
        convert(source, tmp_path / "new", "v2.1")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(DataError, match="exists already"):
        convert(dataset_root, source, "v2.1")
    assert torch.is_tensor(open_dataset(dataset_root)[0]["action"])


def test_the_source_is_not_written_and_the_target_has_the_statistics_that_it_lacks(tmp_path, monkeypatch):
    """Neither is the user's cache folder, where statistics of a source that cannot be written would be kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_dataset(tmp_path / "source", version="v2.1")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in source.rglob("*")}
    assert "q01" not in open_dataset(source).statistics["action"]
    convert(source, tmp_path / "target", "v3.0")
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in source.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    stats = json.loads((tmp_path / "target/meta/stats.json").read_text())["action"]
    np.testing.assert_allclose(stats["q01"], [0.033, -3.267], atol=1e-6)  # of 0, 0.1, ..., 3.3 and their negatives


def test_statistics_and_columns_that_cannot_be_converted_are_one_line_with_the_file(tmp_path, dataset_root):
    source = shutil.copytree(dataset_root, tmp_path / "source")
    path = source / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    column = table.column_names.index("stats/action/q90")
    pq.write_table(table.set_column(column, "stats/action/q90", pa.array([b"x"] * 3)), path)
    with pytest.raises(DataError, match=r"file-000\.parquet: row 0: q90 of action is b'x', and a list of numbers is expected"):
        convert(source, tmp_path / "target", "v2.1")
    source = write_dataset(tmp_path / "v21", version="v2.1")
    path = source / "data/chunk-000/episode_000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["frame_index"]), path)
    with pytest.raises(DataError, match=r"episode_000001\.parquet: .*frame_index.*; restore the file"):
        convert(source, tmp_path / "target", "v3.0")
    assert not (tmp_path / "target").exists()
