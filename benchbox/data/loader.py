"""The endless stream of micro-batches a rank trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset

from benchbox.data.lerobot import open_dataset
from benchbox.data.order import Key, Order
from benchbox.data.sample import sample_path
from benchbox.data.samples import DatasetSamples
from benchbox.data.synthetic import SyntheticSamples
from benchbox.errors import ConfigurationError, DataError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.data.metadata import Statistics
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec


class Samples(Protocol):
    """Something with samples: rows of the batch table, the same for the same (epoch, index) in any process."""

    def __len__(self) -> int: ...

    @property
    def statistics(self) -> list[Statistics]:
        """Feature -> statistic -> values, one mapping for every dataset."""

    def sample(self, epoch: int, index: int) -> Batch: ...


class Stream:
    """An endless iterator of micro-batches; `accumulation` of them make a step. Close it to end its worker processes."""

    def __init__(self, samples: Samples, order: Order, workers: int) -> None:
        self.samples_per_epoch = len(samples)
        self.statistics = samples.statistics
        loader = DataLoader(
            _MicroBatches(samples),
            batch_size=None,  # a key of the sampler is already a whole micro-batch
            sampler=order,
            num_workers=workers,  # torch gives each one thread
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else it draws from the process's generator, and opening a stream changes a run
        )
        self._batches: Iterator[Batch | DataError] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch, each tensor of the batch table with the micro-batch as its first dimension.

        Raises:
            DataError: a sample could not be read, here or in a worker process.
        """
        batch = next(self._batches)
        if isinstance(batch, DataError):
            raise batch
        return batch

    def close(self) -> None:
        """End the workers. The stream yields nothing afterwards."""
        self._batches = iter(())


class _MicroBatches(Dataset):
    """Lists of keys -> micro-batches."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, keys: list[Key]) -> Batch | DataError:
        try:
            rows = [self.samples.sample(key.epoch, key.index) for key in keys]
        except DataError as error:
            return error  # a value: raised in a worker it would arrive wrapped in that worker's traceback
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def open_stream(
    data: DataSpec,
    spec: BatchSpec,
    *,
    batch: int,
    accumulation: int,
    rank: int,
    world_size: int,
    seed: int,
    start_step: int = 0,
) -> Stream:
    """The micro-batches of one rank, as the policy's `spec` wants them, from step `start_step` on.

    The stream is a function of its arguments: opened at step k it continues bit for bit what one opened at step 0 would
    give from there, whatever the number of workers; and a step holds the same samples for the same product of batch,
    accumulation and ranks.

    Raises:
        ConfigurationError: the data cannot be had in the form the policy asks for.
        DataError: the dataset is missing or damaged.
    """
    samples = _open_samples(data, spec, seed)
    if not len(samples):
        raise DataError(f"{data.path or data.kind}: the dataset has no frames")
    order = Order(
        samples=len(samples),
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        start_step=start_step,
    )
    return Stream(samples, order, data.workers)


def _open_samples(data: DataSpec, spec: BatchSpec, seed: int) -> Samples:
    if data.kind == "synthetic":
        return SyntheticSamples(spec, seed)
    if data.kind == "sample":
        return DatasetSamples(open_dataset(sample_path()), spec, seed, data.tokenizer_file)
    if data.kind == "lerobot":
        if data.path is None:
            raise ConfigurationError("data of kind lerobot needs the path of a dataset")
        return DatasetSamples(open_dataset(data.path), spec, seed, data.tokenizer_file)
    raise ConfigurationError(Problem("", f"unknown kind of data {data.kind!r}", "one of sample, lerobot, synthetic"))
