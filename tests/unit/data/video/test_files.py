"""Video files, with every version of PyAV."""

from __future__ import annotations

import av
import numpy as np

from benchbox.data.video.files import VideoReader


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
