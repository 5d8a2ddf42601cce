"""Video files, with every version of PyAV."""

from __future__ import annotations

from functools import partial

import av
import numpy as np

from benchbox.data.video.files import VideoCache, VideoReader, VideoWriter, key_frame_interval
from tests.support.datasets import draw_index


def test_a_video_whose_metadata_is_not_text_is_read(tmp_path):
    """Cameras write comments in encodings of their own, and frames do not depend on them."""
    path = tmp_path / "video.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["comment"] = "COMMENT"
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        frames = [av.VideoFrame.from_ndarray(np.full((32, 32, 3), 60 * level, np.uint8), format="rgb24") for level in range(3)]
        for frame in [*frames, None]:
            for packet in stream.encode(frame):
                container.mux(packet)
    data = path.read_bytes()
    assert b"COMMENT" in data
    path.write_bytes(data.replace(b"COMMENT", b"\xff\xfe\xf0\x80ENT"))
    reader = VideoReader(path, fps=10)
    assert [round(float(reader.frame_at(index / 10).mean()) / 60) for index in range(3)] == [0, 1, 2]
    reader.close()
    assert key_frame_interval(path) == 1, "as different as these frames are, each is a key frame"


def test_the_video_that_was_not_used_for_longest_is_closed_and_opened_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.data.video.files.MAX_OPEN_VIDEOS", 2)
    paths = [tmp_path / f"{number}.mp4" for number in range(3)]
    for number, path in enumerate(paths):
        writer = VideoWriter(path, fps=10, height=32, width=48)
        writer.add(draw_index(number, 32, 48), key_frame=True)
        writer.close()
    cache = VideoCache(10)
    first, second = cache.open(paths[0]), cache.open(paths[1])
    closed = []
    for reader in (first, second):
        monkeypatch.setattr(reader, "close", partial(closed.append, reader.path))
    assert cache.open(paths[0]) is first
    assert cache.open(paths[2]).path == paths[2]
    assert closed == [paths[1]]
    assert cache.open(paths[0]) is first
    assert cache.open(paths[1]) is not second


def test_images_of_odd_sizes_are_written_in_their_size(tmp_path):
    """Videos that are encoded again have any size that their codec allows."""
    writer = VideoWriter(tmp_path / "odd.mp4", fps=10, height=33, width=49)
    writer.add(np.full((33, 49, 3), 200, np.uint8), key_frame=True)
    writer.close()
    image = VideoReader(tmp_path / "odd.mp4", fps=10).frame_at(0.0)
    assert image.shape == (33, 49, 3)
    assert abs(float(image.mean()) - 200) < 3
