"""The decoder of videos: requested, or measured once per dataset and machine, and named."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest

from benchbox.data import open_dataset
from benchbox.data.dataset.lerobot import LeRobotDataset
from benchbox.data.loading.loader import open_stream
from benchbox.data.sample import sample_path
from benchbox.data.video import decoders
from benchbox.data.video.decoders import choose_decoder, installed_decoders, open_reader
from benchbox.errors import ConfigurationError, DataError
from benchbox.spec.cell import DataSpec
from tests.support.datasets import copy_with_short_video
from tests.support.policy_batches import build

MAX_ROUNDING = 2  # levels of 255: the two convert colours by different code
needs_torchcodec = pytest.mark.skipif(
    installed_decoders() == ["pyav"], reason="needs the extra torchcodec and FFmpeg's shared libraries"
)
needs_pyav_only = pytest.mark.skipif(installed_decoders() != ["pyav"], reason="torchcodec is installed")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "benchbox" / "decoders"


def open_one(path, **options):
    data = DataSpec(kind="lerobot", path=str(path), workers=0, **options)
    return open_stream(data, build("pi05").batch_spec(), batch=2, accumulation=1, rank=0, world_size=1, seed=0)


@needs_pyav_only
def test_without_torchcodec_pyav_is_used_and_nothing_is_measured(dataset_root, cache):
    assert choose_decoder(open_dataset(dataset_root).metadata) == "pyav"
    assert open_one(dataset_root).decoder == "pyav"
    assert not cache.exists()
    with pytest.raises(ConfigurationError, match=r"torchcodec is not installed: pip install 'benchbox\[torchcodec\]'") as error:
        open_one(dataset_root, decoder="torchcodec")
    assert "\n" not in str(error.value)


def test_an_unknown_decoder_is_one_line_with_a_suggestion(dataset_root):
    with pytest.raises(ConfigurationError, match=r"unknown decoder 'torchcodek'; .*torchcodec"):
        choose_decoder(open_dataset(dataset_root).metadata, "torchcodek")


def test_a_stream_of_noise_names_no_decoder():
    data, spec = DataSpec(kind="synthetic", workers=0), build("pi05").batch_spec()
    assert open_stream(data, spec, batch=2, accumulation=1, rank=0, world_size=1, seed=0).decoder is None


@needs_torchcodec
@pytest.mark.parametrize("root", ["sample", "bars"])
def test_torchcodec_gives_the_frames_of_pyav_up_to_rounding(root, dataset_root):
    metadata = open_dataset(sample_path() if root == "sample" else dataset_root).metadata
    by_decoder = [LeRobotDataset(metadata, decoder) for decoder in decoders.DECODERS]
    length = len(by_decoder[0])
    frames = [*range(20), *np.random.default_rng(0).integers(length, size=40).tolist(), length - 1]
    for camera in by_decoder[0].cameras:
        for frame in frames:
            ours, theirs = (dataset.image(camera, frame).int() for dataset in by_decoder)
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= MAX_ROUNDING, (camera, frame)


@needs_torchcodec
def test_both_are_measured_once_and_the_choice_is_kept(dataset_root, cache):
    metadata = open_dataset(dataset_root).metadata
    chosen = choose_decoder(metadata)
    (file,) = cache.iterdir()
    content = json.loads(file.read_text())
    times = content["cpu_s_per_frame"]
    assert chosen == content["decoder"] == min(times, key=times.get)
    assert all(0 < time < 1 for time in times.values())
    other = next(decoder for decoder in decoders.DECODERS if decoder != chosen)
    file.write_text(json.dumps({"decoder": other}))
    assert choose_decoder(metadata) == other  # read, not measured again
    assert open_one(dataset_root).decoder == other
    assert choose_decoder(metadata, chosen) == chosen  # a request is not overridden
    file.write_text("{")
    assert choose_decoder(metadata) in decoders.DECODERS
    assert json.loads(file.read_text())["decoder"] in decoders.DECODERS


@needs_torchcodec
def test_the_requested_decoder_reads_the_frames_in_a_worker_too(dataset_root):
    stream = open_one(dataset_root, decoder="torchcodec")
    assert stream.decoder == "torchcodec"
    dataset = pickle.loads(pickle.dumps(LeRobotDataset(open_dataset(dataset_root).metadata, "torchcodec")))
    assert dataset.decoder == "torchcodec"
    video = dataset.episodes[0].videos["observation.images.front"].path
    assert type(dataset._videos.open(video)).__name__ == "TorchcodecReader"
    images = next(stream)["images"]
    assert (images.int() - next(open_one(dataset_root, decoder="pyav"))["images"].int()).abs().max() <= MAX_ROUNDING


@needs_torchcodec
def test_damaged_videos_are_one_line_with_the_file(dataset_root, tmp_path):
    short = LeRobotDataset(open_dataset(copy_with_short_video(dataset_root, tmp_path / "short")).metadata, "torchcodec")
    with pytest.raises(DataError, match=r"front/chunk-000/file-000\.mp4: no frame at 3\.300 s"):
        short.image("front", 33)
    text = tmp_path / "text.mp4"
    text.write_text("text")
    with pytest.raises(DataError, match=r"text\.mp4: not readable as video") as error:
        open_reader("torchcodec", text, 10)
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"none\.mp4: the video is missing"):
        open_reader("torchcodec", tmp_path / "none.mp4", 10)
    cut = shutil.copyfile(short.episodes[0].videos["observation.images.wrist"].path, tmp_path / "cut.mp4")
    cut.write_bytes(cut.read_bytes()[:900])
    with pytest.raises(DataError, match=r"cut\.mp4"):
        open_reader("torchcodec", cut, 10).frame_at(1.0)
