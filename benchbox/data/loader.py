"""Endless stream of micro-batches for the training of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset

from benchbox.data.decoders import choose_decoder
from benchbox.data.lerobot import LeRobotDataset, open_dataset, open_training_dataset
from benchbox.data.order import MicroBatchSampler, SampleKey
from benchbox.data.sample import sample_path
from benchbox.data.samples import DatasetSamples
from benchbox.data.synthetic import SyntheticSamples
from benchbox.errors import ConfigurationError, DataError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.data.groups import SampleGroup
    from benchbox.data.metadata import Statistics
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec


class SampleSource(Protocol):
    """Source of samples: rows of the batch table. A sample is a function of (epoch, index), in every process."""

    @property
    def statistics(self) -> list[Statistics]:
        """Feature -> statistic -> values, one mapping per dataset."""

    def groups(self) -> list[SampleGroup]:
        """Samples that are drawn, as the episodes that they are part of."""

    def sample(self, epoch: int, index: int) -> Batch: ...


class MicroBatchStream:
    """Endless iterator of micro-batches; a step takes `accumulation` of them. Close it to end its worker processes."""

    def __init__(self, samples: SampleSource, sampler: MicroBatchSampler, workers: int) -> None:
        self.statistics = samples.statistics
        self.decoder: str | None = getattr(samples, "decoder", None)  # of videos; None where none are decoded
        loader = DataLoader(
            _MicroBatchDataset(samples),
            batch_size=None,  # an index of the sampler is already a complete micro-batch
            sampler=sampler,
            num_workers=workers,  # torch gives each of them one thread
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # otherwise it draws from the process's generator, which would change the run
        )
        self._batches: Iterator[Batch | ConfigurationError | DataError] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch: the tensors of the batch table, with the batch as their first dimension.

        Raises:
            ConfigurationError: a sample cannot be brought into the form of the spec.
            DataError: a sample could not be read, here or in a worker process.
        """
        batch = next(self._batches)
        if isinstance(batch, ConfigurationError | DataError):
            raise batch
        return batch

    def close(self) -> None:
        """End the worker processes. The stream yields nothing afterwards."""
        self._batches = iter(())


class _MicroBatchDataset(Dataset):
    """Dataset whose indices are lists of sample keys and whose items are micro-batches."""

    def __init__(self, samples: SampleSource) -> None:
        self.samples = samples

    def __getitem__(self, keys: list[SampleKey]) -> Batch | ConfigurationError | DataError:
        try:
            rows = [self.samples.sample(key.epoch, key.index) for key in keys]
        except (ConfigurationError, DataError) as error:
            return error  # returned, because an error raised in a worker arrives with the traceback of that worker
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def open_stream(
    data: DataSpec,
    spec: BatchSpec | None,
    *,
    batch: int,
    accumulation: int,
    rank: int,
    world_size: int,
    seed: int,
    start_step: int = 0,
    own_samples: SampleSource | None = None,
) -> MicroBatchStream:
    """Open the stream of one rank's micro-batches for the policy's `spec`, beginning with step `start_step`.

    The stream is a function of its arguments: opened at step k, it yields bit for bit what a stream opened at step 0 yields
    from step k on, with any number of workers. A step has the same samples for the same product of batch, accumulation and
    ranks.

    Args:
        spec: None for a policy that generates its `own_samples`.

    Raises:
        ConfigurationError: the data cannot be provided in the form that the policy requires.
        DataError: the dataset is missing or damaged.
    """
    if own_samples is not None:
        samples = own_samples
    else:
        assert spec is not None, "a policy reads a dataset or generates its samples"
        samples = _open_samples(data, spec, seed)
    (group,) = samples.groups()
    if not len(group):
        raise DataError(f"{data.path or data.kind}: the dataset has no frames")
    sampler = MicroBatchSampler(
        group=group,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        start_step=start_step,
    )
    return MicroBatchStream(samples, sampler, data.workers)


def _open_samples(data: DataSpec, spec: BatchSpec, seed: int) -> SampleSource:
    if data.kind == "synthetic":
        return SyntheticSamples(spec, seed)
    if data.kind == "sample":
        return DatasetSamples(_decode(open_dataset(sample_path()), data), spec, seed, data.tokenizer_file)
    if data.kind == "lerobot":
        if data.path is None:
            raise ConfigurationError("data of kind lerobot needs the path of a dataset")
        dataset, _ = open_training_dataset(data.path)
        return DatasetSamples(_decode(dataset, data), spec, seed, data.tokenizer_file)
    raise ConfigurationError(Problem("", f"unknown kind of data {data.kind!r}", "one of sample, lerobot, synthetic"))


def _decode(dataset: LeRobotDataset, data: DataSpec) -> LeRobotDataset:
    """Return the dataset with the decoder that its videos are read with."""
    return LeRobotDataset(dataset.metadata, choose_decoder(dataset.metadata, data.decoder))
