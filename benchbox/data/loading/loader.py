"""Endless stream of micro-batches for the training of one rank."""

from __future__ import annotations

import signal
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset

from benchbox.data.dataset.lerobot import LeRobotDataset, open_dataset, open_training_dataset
from benchbox.data.loading.block_stream import BlockBatches, RankBlocks
from benchbox.data.loading.packing import PackedSamples, pack
from benchbox.data.loading.prefetch import CudaCopier
from benchbox.data.loading.trimming import trim
from benchbox.data.order.correlation import EpisodeCorrelation, matches_by_chance
from benchbox.data.order.episode_shuffle import EpisodeShuffle
from benchbox.data.order.frames import FrameOrder, MicroBatchSampler, SampleKey
from benchbox.data.sample import SAMPLE, sample_path
from benchbox.data.samples.description import DataUse, describe_data
from benchbox.data.samples.mixture import MixtureSamples, select_datasets
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.data.video.decoders import choose_decoder
from benchbox.errors import ConfigurationError, DataError, Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence

    from benchbox.data.format.metadata import Statistics
    from benchbox.data.loading.prefetch import Copier
    from benchbox.data.order.groups import SampleGroup
    from benchbox.data.samples.provenance import Provenance
    from benchbox.data.text.fast import FastTokenizer
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec


class SampleMaker(Protocol):
    """Maker of samples, in the main process or a worker."""

    def sample(self, epoch: int, index: int) -> Batch: ...


class SampleSource(SampleMaker, Protocol):
    """Source of samples: rows of the batch table. A sample is a function of (epoch, index), in every process."""

    @property
    def statistics(self) -> list[Statistics]:
        """Feature -> statistic -> values, one mapping per dataset."""

    @property
    def provenance(self) -> Provenance:
        """Names of datasets, sources and control modes."""

    @property
    def decoder(self) -> str | None:
        """Decoder of videos, None where none are decoded."""

    def groups(self) -> list[SampleGroup]:
        """Samples that are drawn, as the episodes that they are part of."""

    def episode_of(self, index: int) -> Hashable:
        """Return the episode of a sample, which no sample of another episode has."""


class MicroBatchStream:
    """Endless iterator of micro-batches; a step takes `accumulation` of them. Close it to end its worker processes.

    Args:
        copier: copies batches to a device, one batch ahead of the step. Without one they stay on the host.
        spec: what the batches were asked to be; None for a policy that generates them.
    """

    def __init__(
        self,
        batches: Iterator[PackedSamples],
        samples: SampleSource,
        data_use: DataUse,
        copier: Copier | None = None,
        spec: BatchSpec | None = None,
    ) -> None:
        self.spec = spec
        self.samples = samples
        self.data_use = data_use
        self.statistics = samples.statistics
        self.decoder = samples.decoder
        self.provenance = samples.provenance
        groups = samples.groups()
        self._groups = groups
        self._correlation = EpisodeCorrelation(matches_by_chance(groups, samples.episode_of))
        self._batches = batches
        self._copier = copier
        self._ahead: tuple[Batch, Batch] | Exception | None = None  # the next batch and its copy, or why there is none

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch: the tensors of the batch table, with the batch as their first dimension.

        Raises:
            ConfigurationError: a sample cannot be brought into the form of the spec.
            DataError: a sample could not be read, here or in a worker process.
        """
        if self._copier is None:
            batch = next(self._batches).unpack()
            self._count(batch)
            return batch
        if self._ahead is None:
            self._ahead = self._copy_next(self._copier)
        if isinstance(self._ahead, Exception):
            raise self._ahead
        batch, copy = self._ahead
        self._count(batch)
        finished = self._copier.finish(copy)
        self._ahead = self._copy_next(self._copier)  # an error in it is of the next step
        return finished

    def _copy_next(self, copier: Copier) -> tuple[Batch, Batch] | Exception:
        try:
            batch = next(self._batches).unpack()
        except (ConfigurationError, DataError, StopIteration) as error:
            return error
        return batch, copier.start(batch)

    def _count(self, batch: Batch) -> None:
        self.data_use.count(batch)
        self._correlation.add(batch)

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that are drawn once in an epoch; None where datasets have weights, and so epochs of their own."""
        return len(self._groups[0]) if len(self._groups) == 1 else None

    def episode_warning(self) -> str | None:
        """Return a line with the remedy if recent batches were nearly of one episode."""
        return self._correlation.warning()

    def close(self) -> None:
        """End the worker processes. The stream yields nothing afterwards."""
        self._batches = iter(())
        self._ahead = None


def load_samples(
    samples: SampleMaker,
    sampler: Iterable[list[SampleKey]],
    workers: int,
    *,
    pin_memory: bool = False,
    trimmable: Collection[str] = (),
) -> Generator[PackedSamples]:
    """Return an iterator over the samples of the lists of keys in `sampler`. It owns the worker processes, which load ahead
    and end when it is closed.

    The padding that all samples of a list share is left out of the parts that are `trimmable`.

    Its `next` raises the ConfigurationError or DataError of a sample, and ends the workers.
    """
    if pin_memory:
        # DataLoader's thread that pins memory sets one thread for itself, and for all that have not asked for their number yet.
        torch.get_num_threads()
    loader = DataLoader(
        _KeysDataset(samples, trimmable),
        batch_size=None,  # an index of the sampler is already complete
        sampler=sampler,
        num_workers=workers,  # torch gives each of them one thread
        pin_memory=pin_memory,
        generator=torch.Generator(),  # otherwise it draws from the process's generator, which would change the run
    )
    return _raise_errors(iter(loader))  # which starts the workers


def _raise_errors(items: Iterator[PackedSamples | ConfigurationError | DataError]) -> Generator[PackedSamples]:
    try:
        yield from map(_raise_error, items)  # a loop would keep every item until the next one is asked for
    except (RuntimeError, OSError, EOFError) as error:
        if (ending := _worker_ending(items)) is None:
            raise
        raise RuntimeError(ending) from error


def _worker_ending(items: object) -> str | None:
    """Return how a worker process has ended, None if all are alive.

    torch often notices only that a socket or file of the process is gone, and its error names nothing else.
    """
    workers = getattr(items, "_workers", ())
    ended = wait([worker.sentinel for worker in workers], timeout=1) if workers else ()
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()
            code = worker.exitcode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            hint = ", as the host does when it is out of memory: lower data.workers" if code == -signal.SIGKILL else ""
            return f"loader process {worker.pid} ended {how}{hint}"
    return None


def _raise_error(item: PackedSamples | ConfigurationError | DataError) -> PackedSamples:
    if isinstance(item, ConfigurationError | DataError):
        raise item
    return item


class _KeysDataset(Dataset):
    """Dataset whose indices are lists of sample keys."""

    def __init__(self, samples: SampleMaker, trimmable: Collection[str]) -> None:
        self.samples = samples
        self.trimmable = trimmable

    def __getitem__(self, keys: list[SampleKey]) -> PackedSamples | ConfigurationError | DataError:
        try:
            return pack(trim(stacked_samples(self.samples, keys), self.trimmable))
        except (ConfigurationError, DataError) as error:
            return error  # returned, because an error raised in a worker arrives with the traceback of that worker


def stacked_samples(samples: SampleMaker, keys: list[SampleKey]) -> list[Batch]:
    """Return the rows of `keys`, stacked in one or several parts."""
    if isinstance(samples, MixtureSamples):
        return samples.samples(keys)
    return [{name: value[None] for name, value in samples.sample(key.epoch, key.index).items()} for key in keys]


def open_stream(
    data: DataSpec,
    spec: BatchSpec | None,
    *,
    batch: int,
    accumulation: int,
    rank: int,
    world_size: int,
    seed: int,
    order: str = "frame_shuffle",
    start_step: int = 0,
    own_samples: SampleSource | None = None,
    on_host: bool = False,
    trimmable: Collection[str] = (),
) -> MicroBatchStream:
    """Open the stream of one rank's micro-batches for the policy's `spec`, beginning with step `start_step`.

    The stream is a function of its arguments: opened at step k, it yields bit for bit what a stream opened at step 0 yields
    from step k on, with any number of workers. A step has the same samples for the same product of batch, accumulation and
    ranks.

    Args:
        spec: None for a policy that generates its `own_samples`.
        order: frame_shuffle, episode_shuffle or sequential.
        on_host: whether micro-batches stay on the host also where there is a GPU.
        trimmable: parts of a micro-batch without the padding that all its samples share (`BatchSpec.trimmable`).

    Raises:
        ConfigurationError: the data cannot be provided in the form that the policy requires.
        DataError: the dataset is missing or damaged.
    """
    if own_samples is not None:
        samples = own_samples
    else:
        assert spec is not None, "a policy reads a dataset or generates its samples"
        samples = open_samples(data, spec, seed)
    data_use = DataUse(describe_data(data, samples))
    pinned = torch.cuda.is_available() and not on_host
    if order == "episode_shuffle":
        samples_per_rank = batch * accumulation
        shuffle = EpisodeShuffle(
            samples.groups(), seed, samples_per_step=samples_per_rank * world_size, block=data.block, buffer=data.buffer
        )
        blocks = RankBlocks(order=shuffle, samples_per_rank=samples_per_rank, rank=rank, start_step=start_step)
        loaded = load_samples(samples, blocks, data.workers)
        batches: Iterator[PackedSamples] = BlockBatches(
            blocks, loaded.__next__, batch=batch, pinned=pinned, trimmable=trimmable
        )
    else:
        sampler = MicroBatchSampler(
            order=FrameOrder(samples.groups(), seed, shuffled=order == "frame_shuffle"),
            batch=batch,
            accumulation=accumulation,
            rank=rank,
            world_size=world_size,
            start_step=start_step,
        )
        batches = load_samples(samples, sampler, data.workers, pin_memory=pinned, trimmable=trimmable)
    return MicroBatchStream(batches, samples, data_use, CudaCopier() if pinned else None, spec)


def open_samples(
    data: DataSpec, spec: BatchSpec, seed: int, *, fast: FastTokenizer | None = None, cameras: Sequence[str] = ()
) -> MixtureSamples | SyntheticSamples:
    """Open the samples that are trained on.

    Args:
        fast, cameras: see `MixtureSamples`.

    Raises:
        ConfigurationError: the data cannot be provided in the form that the policy requires.
        DataError: a dataset is missing or damaged.
    """
    if data.kind == "synthetic":
        return SyntheticSamples(spec, seed)
    if data.kind == "sample":
        opened = [(_decode(open_dataset(sample_path()), data), SAMPLE)]
    elif data.kind == "lerobot":
        if not data.lerobot_datasets:
            raise ConfigurationError("data of kind lerobot needs the path of a dataset")
        opened = [(_decode(open_training_dataset(dataset.path)[0], data), dataset) for dataset in data.lerobot_datasets]
    else:
        raise ConfigurationError(Problem("", f"unknown kind of data {data.kind!r}", "one of sample, lerobot, synthetic"))
    members = select_datasets(opened, validation=data.validation, seed=seed)
    return MixtureSamples(members, spec, seed, data.tokenizer_file, fast=fast, cameras=cameras)


def _decode(dataset: LeRobotDataset, data: DataSpec) -> LeRobotDataset:
    """Return the dataset with the decoder that its videos are read with."""
    return LeRobotDataset(dataset.metadata, choose_decoder(dataset.metadata, data.decoder))
