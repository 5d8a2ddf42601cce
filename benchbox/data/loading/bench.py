"""Speed of loading: samples per second by order and workers, frames decoded per frame used, and where the time goes."""

from __future__ import annotations

import os
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from benchbox.data.dataset import frame_images
from benchbox.data.dataset.images import ImageColumns
from benchbox.data.format.tables import TableCache
from benchbox.data.loading.loader import load_samples, open_samples, open_stream
from benchbox.data.order.episode_shuffle import EpisodeShuffle
from benchbox.data.order.frames import FrameOrder, MicroBatchSampler
from benchbox.data.order.groups import generated_group
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.data.text.fast import FastTokenizer
from benchbox.data.text.prompt import CachedEncoder
from benchbox.data.video.decoders import installed_decoders, reader_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchbox.data.order.frames import Order, SampleKey
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec

STAGES = ("read", "decode", "resize", "tokenise", "transport", "other")
TOLERANCE = 0.05  # of the best rate, below which fewer workers are preferred
TRANSPORT_BATCHES = 100
BREAKDOWN_SAMPLES = 512
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingRate:
    """Samples per second of an order with a number of worker processes, while nothing else is computed."""

    order: str
    workers: int
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingCost:
    """Seconds of one process per sample by stage, and frames decoded per frame used (None without videos)."""

    order: str
    seconds: dict[str, float]
    decoded_per_used: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingReport:
    """Measurements of a dataset. `key_frame_interval` is that of its first video, None where it is unknown."""

    rates: list[LoadingRate]
    costs: list[LoadingCost]
    key_frame_interval: int | None


def measure_loading(
    data: DataSpec,
    spec: BatchSpec,
    *,
    orders: Sequence[str],
    workers: Sequence[int],
    batch: int,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> LoadingReport:
    """Measure a LeRobot dataset in every order with every number of workers.

    Args:
        on_progress: called with a description of every measurement before it begins.

    Raises:
        ConfigurationError: the data cannot be provided in the form of the spec.
        DataError: the dataset is missing or damaged.
    """
    samples = open_samples(data, spec, _SEED)
    assert isinstance(samples, MixtureSamples)
    rates, costs = [], []
    for order in orders:
        on_progress(f"{order}: cost of a sample")
        costs.append(measure_cost(samples, order, data, batch=batch))
        for count in workers:
            on_progress(f"{order}: {count} workers")
            rates.append(measure_rate(replace(data, workers=count), spec, order, batch=batch, seconds=seconds))
    return LoadingReport(rates=rates, costs=costs, key_frame_interval=samples.members[0].dataset.key_frame_interval())


def measure_rate(data: DataSpec, spec: BatchSpec, order: str, *, batch: int, seconds: float) -> LoadingRate:
    """Measure samples per second, after the workers have started and the buffer of episode_shuffle is full.

    Raises:
        ConfigurationError: the data cannot be provided in the form of the spec.
        DataError: the dataset is missing or damaged.
    """
    opened = open_stream(data, spec, order=order, batch=batch, accumulation=1, rank=0, world_size=1, seed=_SEED)
    with closing(opened) as stream:
        lanes = data.buffer // data.block if order == "episode_shuffle" else 0
        for _ in range(2 * (data.workers + 1) + lanes // batch + 1):
            next(stream)
        start, batches = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds or not batches:
            next(stream)
            batches += 1
    return LoadingRate(order=order, workers=data.workers, samples_per_s=batches * batch / elapsed)


def measure_cost(samples: MixtureSamples, order: str, data: DataSpec, *, batch: int) -> LoadingCost:
    """Measure where the time of a sample goes, in this process; the transport from a worker is measured apart.

    Raises:
        DataError: the dataset is damaged.
    """
    keys = _first_keys(samples, order, data, batch)
    size = data.block if order == "episode_shuffle" else batch
    counts = samples.members[0].dataset.frame_counts
    before = replace(counts)
    clock = StageClock()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    with clock.installed():
        start = time.perf_counter()
        for first in range(0, len(keys), size):
            samples.samples(keys[first : first + size])
        total = time.perf_counter() - start
    torch.set_num_threads(threads)
    seconds = {stage: clock.seconds[stage] / len(keys) for stage in STAGES[:4]}
    seconds["other"] = total / len(keys) - sum(seconds.values())
    seconds["transport"] = measure_transport(samples.sample(keys[0].epoch, keys[0].index), size)
    decoded, used = counts.decoded - before.decoded, counts.used - before.used
    return LoadingCost(
        order=order,
        seconds={stage: seconds[stage] for stage in STAGES},
        decoded_per_used=decoded / used if used else None,
    )


def measure_transport(row: Batch, size: int) -> float:
    """Return the seconds per sample that a worker and the main process take to stack and pass on `size` samples at a time."""
    sampler = MicroBatchSampler(
        order=FrameOrder([generated_group(size)], 0), batch=size, accumulation=1, rank=0, world_size=1, start_step=0
    )
    loaded = load_samples(_ConstantSamples(row), sampler, workers=1)
    next(loaded)
    start = time.perf_counter()
    for _ in range(TRANSPORT_BATCHES):
        next(loaded)
    return (time.perf_counter() - start) / (TRANSPORT_BATCHES * size)


def recommend_workers(rates: Sequence[LoadingRate], cores: int | None = None) -> int:
    """Return the smallest number of workers within 5% of the best rate, and at most one less than there are cores."""
    limit = max(0, (len(os.sched_getaffinity(0)) if cores is None else cores) - 1)
    candidates = [rate for rate in rates if rate.workers <= limit] or [min(rates, key=lambda rate: rate.workers)]
    best = max(rate.samples_per_s for rate in candidates)
    return min(rate.workers for rate in candidates if rate.samples_per_s >= (1 - TOLERANCE) * best)


@dataclass(slots=True)
class StageClock:
    """Times of the functions that make a sample, by stage, in this process."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Time the functions inside the block."""
        targets: tuple[tuple[str, Any, str], ...] = (
            ("read", TableCache, "rows"),
            *(("decode", reader_class(decoder), "frame_at") for decoder in installed_decoders()),
            ("decode", ImageColumns, "image"),
            ("resize", frame_images, "letterbox"),
            ("tokenise", CachedEncoder, "__call__"),
            ("tokenise", FastTokenizer, "encode_chunks"),
        )
        originals = [(owner, name, getattr(owner, name)) for _, owner, name in targets]
        try:
            for stage, owner, name in targets:
                setattr(owner, name, self._timed(stage, getattr(owner, name)))
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[stage] += time.perf_counter() - start

        return timed


class _ConstantSamples:
    """Source of one sample that takes no time to make."""

    def __init__(self, row: Batch) -> None:
        self._row = row

    def sample(self, epoch: int, index: int) -> Batch:  # noqa: ARG002
        return self._row


def _first_keys(samples: MixtureSamples, order: str, data: DataSpec, batch: int) -> list[SampleKey]:
    """Return the first keys of an order, as one process reads them: block by block in episode_shuffle."""
    if order == "episode_shuffle":
        shuffle = EpisodeShuffle(samples.groups(), _SEED, samples_per_step=batch, block=data.block, buffer=data.buffer)
        return [key for number in range(-(-BREAKDOWN_SAMPLES // data.block)) for key in shuffle.block_keys(number)]
    frames: Order = FrameOrder(samples.groups(), _SEED, shuffled=order == "frame_shuffle")
    return [frames.key(position) for position in range(BREAKDOWN_SAMPLES)]
