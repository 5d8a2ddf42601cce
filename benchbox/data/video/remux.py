"""Videos of episodes copied from file to file without encoding them again, where key frames and timestamps allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import av

from benchbox.data.format.layouts.layout import WrittenVideo
from benchbox.data.video.files import VideoReader, VideoWriter, check_start, open_video, start_time_s
from benchbox.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.data.format.layouts.layout import Layout
    from benchbox.data.format.metadata import VideoSpan

_MIB = 2**20


class VideoCopier:
    """Writer of the video files of one camera from episodes in other files. `encoded` counts those that were encoded again.

    Args:
        root: folder of the new dataset.
        feature: name of the camera's feature.
        fps: frames per second of both datasets.
        layout: of the new dataset.
        limit_mib: size at which the next file is begun where episodes share files.
    """

    def __init__(self, root: Path, feature: str, *, fps: float, layout: Layout, limit_mib: float) -> None:
        self.encoded = 0
        self._root, self._feature, self._fps, self._layout = root, feature, fps, layout
        self._limit_bytes = limit_mib * _MIB if layout.shares_files else 0
        self._file: _CopiedFile | None = None
        self._number = -1

    def append(self, span: VideoSpan, frames: int) -> WrittenVideo:
        """Copy an episode, and return where it is.

        Raises:
            DataError: the video is missing or damaged, or lacks a frame of the episode.
        """
        try:
            with open_video(span.path) as source:
                stream = source.streams.video[0]
                check_start(span.path, start_time_s(stream), span.from_s, self._fps)
                packets = _packets_of(source, stream, span.from_s, frames, 1 / self._fps)
                if packets is None:
                    return self._encode(span, frames)
                return self._copy(packets, stream, span.from_s, frames)
        except av.FFmpegError as error:
            raise DataError(f"{span.path}: the episode at {span.from_s:.3f} s cannot be copied ({error})") from None

    def _copy(self, packets: list[Any], stream: Any, from_s: float, frames: int) -> WrittenVideo:
        if self._file is None or self._file.bytes >= self._limit_bytes or not self._file.accepts(stream, packets[0], from_s):
            self.close()
            self._file = _CopiedFile(self._next_path(), stream, self._fps)
        start_s = self._file.end_s
        self._file.append(packets, from_s)
        self._file.frames += frames
        return WrittenVideo(self._number, start_s, self._file.end_s)

    def _encode(self, span: VideoSpan, frames: int) -> WrittenVideo:
        """Write an episode that cannot be copied into a file of its own."""
        if not float(self._fps).is_integer():
            raise DataError(
                f"{span.path}: must be encoded again, which {self._fps:g} frames per second do not allow: not a whole number"
            )
        self.close()
        self.encoded += 1
        reader = VideoReader(span.path, self._fps)
        first = reader.frame_at(span.from_s)
        writer = VideoWriter(self._next_path(), fps=round(self._fps), height=first.shape[0], width=first.shape[1])
        for frame in range(frames):
            writer.add(reader.frame_at(span.from_s + frame / self._fps), key_frame=frame == 0)
        writer.close()
        reader.close()
        return WrittenVideo(self._number, 0.0, frames / self._fps)

    def close(self) -> None:
        """Finish the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_path(self) -> Path:
        self._number += 1
        path = self._root / self._layout.video_path.format(video_key=self._feature, **self._layout.file_names(self._number))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class _CopiedFile:
    def __init__(self, path: Path, template: Any, fps: float) -> None:
        self.frames = self.bytes = 0
        self._fps = fps
        self._last_dts: int | None = None
        self._parameters = _parameters(template)
        self._container = av.open(str(path), mode="w")
        # opaque: no encoder is needed, and for what dav1d decodes there is none
        self._stream = self._container.add_stream_from_template(template, opaque=True)

    @property
    def end_s(self) -> float:
        """Time of the next frame."""
        return self.frames / self._fps

    def accepts(self, stream: Any, first_packet: Any, from_s: float) -> bool:
        """Return whether packets of a stream are decoded by the same parameters, and the first after those of the file.

        After an episode too short for reordered frames, it may be that the first packet of the next is to be decoded earlier.
        """
        is_later = self._last_dts is None or first_packet.dts + self._shift(first_packet, from_s) > self._last_dts
        return is_later and _parameters(stream) == self._parameters

    def append(self, packets: list[Any], from_s: float) -> None:
        for packet in packets:
            shift = self._shift(packet, from_s)
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            packet.stream = self._stream
            self._last_dts = packet.dts
            self.bytes += packet.size
            self._container.mux(packet)

    def _shift(self, packet: Any, from_s: float) -> int:
        shift: int = round((self.end_s - from_s) / packet.time_base)
        return shift

    def close(self) -> None:
        self._container.close()


def _parameters(stream: Any) -> tuple[Any, ...]:
    context = stream.codec_context
    return context.name, context.width, context.height, context.pix_fmt, context.extradata, stream.time_base


def _packets_of(container: Any, stream: Any, from_s: float, frames: int, period_s: float) -> list[Any] | None:
    """Return the packets of `frames` frames from a time on, in the order of the file; None unless they decode by themselves.

    They do if the first one is a key frame, none of another frame lies between them, and there is one for every frame.
    """
    container.seek(round(from_s / stream.time_base), stream=stream)
    packets, begun = [], False
    for packet in container.demux(stream):
        if packet.pts is None or packet.dts is None:
            continue
        frame = (float(packet.pts * packet.time_base) - from_s) / period_s
        position = round(frame)
        is_inside = 0 <= position < frames and abs(frame - position) < 0.25
        if not begun and is_inside:
            if not packet.is_keyframe or position != 0:
                return None
            begun = True
        if begun:
            if not is_inside:
                break
            packets.append(packet)
    return packets if len(packets) == frames else None
