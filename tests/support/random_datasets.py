"""Random LeRobot datasets, written with PyArrow and PyAV alone, and what a reader must return of them.

Layouts, codecs, sizes, files and texts meet here in ways that nobody has thought of. Such datasets have shown texts that were
taken for several lines, and videos that could not be copied into one file.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchbox.data.format.layouts import v2, v30
from tests.support.datasets import draw_index, encode_image

if TYPE_CHECKING:
    from pathlib import Path

RATES = (1, 5, 10, 12.5, 15, 23.976, 29.97, 30, 60)
TEXTS = ("push the block", "", "öffne", "拿起", "a\u2028b", "a\x85b", "two\nlines", "{braces}", 'a "quoted" \\ text', "spaces ")
NAMES = ("größe", "vel.joint", "observation.state.vel", "action.gripper", "next.reward", "size", "front")
DTYPES = ("float32", "float64", "int64", "uint8", "bool")
INDICES = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64"}
ENCODERS = (  # with their pixels, and options that make them fast and the same in every run
    ("libx264", "yuv420p", {"preset": "ultrafast", "x264-params": "open-gop=1", "threads": "1"}),
    ("libx264", "yuv444p", {"preset": "ultrafast", "threads": "1"}),
    ("libsvtav1", "yuv420p", {"preset": "12", "svtav1-params": "lp=1"}),
    ("mpeg4", "yuv420p", {}),
)
TICKS = 90_000  # per second, of videos


@dataclass(kw_only=True)
class RandomDataset:
    """A dataset that was written, and the values of all its frames: columns (frames, ...), tasks, and images (H, W, 3)."""

    root: Path
    version: str
    fps: float
    lengths: list[int]  # of the episodes
    numbers: list[int]  # of the episodes: those of v2 may have gaps
    chunk: int  # files in a folder
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    images: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @property
    def frames(self) -> list[range]:
        """Frames of every episode."""
        return [range(*bounds) for bounds in pairwise(accumulate(self.lengths, initial=0))]

    @property
    def tasks(self) -> list[str]:
        """Task of every frame."""
        return [self.texts[number] for number in self.columns["task_index"].tolist()]

    @property
    def is_shared(self) -> bool:
        """Return whether episodes share files."""
        return self.version == "v3.0"

    def files(self, draw: random.Random) -> list[int]:
        """Return the number of the file of every episode."""
        return list(accumulate((draw.random() < 0.4 for _ in self.lengths[1:]), initial=0)) if self.is_shared else self.numbers

    def path_fields(self, file: int) -> dict[str, int]:
        """Return the fields of the paths of a file."""
        chunk, number = divmod(file, self.chunk)
        if self.is_shared:
            return {"chunk_index": chunk, "file_index": number}
        return {"episode_chunk": chunk, "episode_index": file}

    def path(self, template: str, file: int, camera: str = "") -> Path:
        """Return the path of a file, in a folder that exists."""
        path = self.root / template.format(video_key=camera, **self.path_fields(file))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def write_random_dataset(root: Path, seed: int) -> RandomDataset:
    """Write a dataset that is a function of the seed."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    version = draw.choice(("v2.0", "v2.1", "v3.0", "v3.0"))
    lengths = [draw.choice((1, 2, 17, draw.randint(1, 40))) for _ in range(draw.randint(1, 6))]
    has_gaps = version != "v3.0" and draw.random() < 0.3
    numbers = sorted(draw.sample(range(20), len(lengths))) if has_gaps else list(range(len(lengths)))
    made = RandomDataset(
        root=root, version=version, fps=draw.choice(RATES), lengths=lengths, numbers=numbers, chunk=draw.choice((1000, 2, 3))
    )
    _draw_columns(made, draw, rng)
    cells, spans = {}, {}
    for number in range(draw.choice((0, 1, 1, 2))):
        camera = f"observation.images.{draw.choice(NAMES)}{number}"
        kind = draw.choice(("video", "video", "image"))
        encoder = draw.choice(ENCODERS)
        odd = kind == "image" or encoder[1] == "yuv444p"
        size = draw.choice((33, 65) if odd else (64, 68)), draw.choice((72, 64))
        made.features[camera] = {"dtype": kind, "shape": [*size, 3], "names": None}
        if kind == "video":
            spans[camera] = _write_videos(made, draw, camera, size, encoder)
        else:
            made.images[camera] = [draw_index(index, *size) for index in range(sum(lengths))]
            cells[camera] = [{"bytes": encode_image(image), "path": "frame.png"} for image in made.images[camera]]
    data_files = _write_tables(made, draw, cells)
    _write_metadata(made, draw, data_files, spans)
    return made


def _draw_columns(made: RandomDataset, draw: random.Random, rng: np.random.Generator) -> None:
    total = sum(made.lengths)
    features = {name: (draw.choice(DTYPES[:3]), [draw.choice((1, 2, 7, 32))]) for name in ("observation.state", "action")}
    features |= {
        name: (draw.choice(DTYPES), draw.choice(([1], [3], [2, 3]))) for name in draw.sample(NAMES, draw.randint(0, 3))
    }
    for name, (dtype, shape) in features.items():
        made.columns[name] = (rng.normal(size=(total, *shape)) * 10 ** rng.uniform(-2, 2)).astype(dtype)
        made.columns[name][:, 0] = made.columns[name][0, 0]  # without range
    made.texts = draw.sample(TEXTS, draw.randint(1, len(TEXTS)))
    frame_index = np.concatenate([np.arange(length) for length in made.lengths])
    made.columns |= {
        "timestamp": (frame_index / made.fps).astype(np.float32),
        "frame_index": frame_index,
        "episode_index": np.repeat(made.numbers, made.lengths),
        "index": np.arange(total),
        "task_index": rng.integers(0, len(made.texts), total),
    }
    kinds = features | {name: (dtype, [1]) for name, dtype in INDICES.items()}
    made.features = {name: {"dtype": dtype, "shape": shape, "names": None} for name, (dtype, shape) in kinds.items()}


def _write_videos(
    made: RandomDataset, draw: random.Random, camera: str, size: tuple[int, int], encoder: tuple[str, str, dict[str, str]]
) -> list[dict[str, Any]]:
    """Write the videos of a camera, and return the columns of every episode that say where it is.

    Images are those that a decoder gives that begins at the start of the file and seeks nowhere.
    """
    codec, pixels, options = encoder
    options = options | {
        "g": str(draw.choice((1, 2, 8, 250))),
        "bf": str(draw.choice((0, 2, 3))) if codec == "libx264" else "0",
    }
    first_s = draw.choice((0, 0.5)) if made.is_shared else 0
    files, spans, images = made.files(draw), [], {}
    for file in dict.fromkeys(files):
        frames = [frame for number, episode in zip(files, made.frames, strict=True) if number == file for frame in episode]
        path = made.path((v30 if made.is_shared else v2).VIDEO, file, camera)
        with av.open(str(path), "w") as container:
            stream = container.add_stream(codec, rate=Fraction(made.fps).limit_denominator(1001), options=options)
            stream.height, stream.width, stream.pix_fmt = *size, pixels
            stream.codec_context.time_base = Fraction(1, TICKS if codec != "mpeg4" else 60_000)
            base = stream.codec_context.time_base
            for position, index in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(draw_index(index, *size), format="rgb24")
                frame.pts, frame.time_base = round((first_s + position / made.fps) / base), base
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with av.open(str(path)) as container:
            decoded = {frame.pts: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)}
        images |= {index: decoded[pts] for index, pts in zip(frames, sorted(decoded), strict=True)}
        start_s = first_s
        for number, length in zip(files, made.lengths, strict=True):
            if number == file:
                stop_s = start_s + length / made.fps
                spans.append(made.path_fields(file) | {"from_timestamp": float(start_s), "to_timestamp": stop_s})
                start_s = stop_s
    made.images[camera] = [images[index] for index in range(sum(made.lengths))]
    return spans


def _write_tables(made: RandomDataset, draw: random.Random, cells: dict[str, list[dict[str, Any]]]) -> list[int]:
    """Write the data files, and return the number of the file of every episode."""
    files = made.files(draw)
    rows = np.repeat(files, made.lengths)
    for file in dict.fromkeys(files):
        columns = {}
        for name, values in made.columns.items():
            part = values[rows == file]
            columns[name] = pa.array(part.tolist() if part.shape[1:] not in ((), (1,)) else part.ravel())
        for camera, images in cells.items():
            columns[camera] = pa.array([image for image, number in zip(images, rows, strict=True) if number == file])
        path = made.path((v30 if made.is_shared else v2).DATA, file)
        pq.write_table(pa.table(columns), path, row_group_size=draw.choice((1, 7, 1000)))
    return files


def _write_metadata(
    made: RandomDataset, draw: random.Random, data_files: list[int], spans: dict[str, list[dict[str, Any]]]
) -> None:
    layout, meta = v30 if made.is_shared else v2, made.root / "meta"
    (meta / "episodes/chunk-000").mkdir(parents=True)
    info = {"codebase_version": made.version, "fps": made.fps, "features": made.features, "chunks_size": made.chunk}
    info |= {"total_episodes": len(made.lengths), "total_frames": sum(made.lengths), "total_tasks": len(made.texts)}
    info |= {"data_path": layout.DATA, "video_path": layout.VIDEO}
    (meta / "info.json").write_text(json.dumps(info), encoding="utf-8")
    episodes = [
        {"episode_index": number, "tasks": list(dict.fromkeys(made.tasks[frames.start : frames.stop])), "length": len(frames)}
        for number, frames in zip(made.numbers, made.frames, strict=True)
    ]
    if not made.is_shared:
        tasks = [{"task_index": index, "task": text} for index, text in enumerate(made.texts)]
        for name, entries in (("episodes", episodes), ("tasks", tasks)):
            lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]  # as LeRobot writes them
            (meta / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        return
    for number, (row, frames) in enumerate(zip(episodes, made.frames, strict=True)):
        row |= {"dataset_from_index": frames.start, "dataset_to_index": frames.stop}
        row |= {f"data/{key}": value for key, value in made.path_fields(data_files[number]).items()}
        for camera, columns in spans.items():
            row |= {f"videos/{camera}/{key}": value for key, value in columns[number].items()}
    half = draw.randint(1, len(episodes))
    for number, part in enumerate((episodes[:half], episodes[half:])):
        if part:
            pq.write_table(pa.Table.from_pylist(part), meta / f"episodes/chunk-000/file-{number:03d}.parquet")
    index = pd.Index(made.texts, name="task")
    pd.DataFrame({"task_index": range(len(made.texts))}, index=index).to_parquet(meta / "tasks.parquet")
