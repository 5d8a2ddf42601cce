"""Endless stream of micro-batches for the training of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch.utils.data import DataLoader, Dataset

from benchbox.data.description import DataUse, describe_data
from benchbox.data.lerobot import open_dataset, open_training_dataset
from benchbox.data.mixture import MixtureSamples, select_datasets
from benchbox.data.order import MicroBatchSampler, SampleKey
from benchbox.data.sample import SAMPLE, sample_path
from benchbox.data.synthetic import SyntheticSamples
from benchbox.errors import ConfigurationError, DataError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.data.groups import SampleGroup
    from benchbox.data.metadata import Statistics
    from benchbox.data.provenance import Provenance
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec


class SampleSource(Protocol):
    """Source of samples: rows of the batch table. A sample is a function of (epoch, index), in every process."""

    @property
    def statistics(self) -> list[Statistics]:
        """Feature -> statistic -> values, one mapping per dataset."""

    @property
    def provenance(self) -> Provenance:
        """Names of datasets, sources and control modes."""

    def groups(self) -> list[SampleGroup]:
        """Samples that are drawn, as the episodes that they are part of."""

    def sample(self, epoch: int, index: int) -> Batch: ...


class MicroBatchStream:
    """Endless iterator of micro-batches; a step takes `accumulation` of them. Close it to end its worker processes."""

    def __init__(self, samples: SampleSource, sampler: MicroBatchSampler, workers: int, data_use: DataUse) -> None:
        self.data_use = data_use
        self.statistics = samples.statistics
        self.provenance = samples.provenance
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
        self.data_use.count(batch)
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
    groups = samples.groups()
    if len(groups) > 1:
        raise ConfigurationError("datasets with weights cannot be interleaved yet: leave the weights out")
    (group,) = groups
    if not len(group):
        raise DataError(f"{data.label}: the dataset has no frames")
    sampler = MicroBatchSampler(
        group=group,
        batch=batch,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        seed=seed,
        start_step=start_step,
    )
    return MicroBatchStream(samples, sampler, data.workers, DataUse(describe_data(data, samples)))


def _open_samples(data: DataSpec, spec: BatchSpec, seed: int) -> SampleSource:
    if data.kind == "synthetic":
        return SyntheticSamples(spec, seed)
    if data.kind == "sample":
        opened = [(open_dataset(sample_path()), SAMPLE)]
    elif data.kind == "lerobot":
        if not data.lerobot_datasets:
            raise ConfigurationError("data of kind lerobot needs the path of a dataset")
        opened = [(open_training_dataset(dataset.path)[0], dataset) for dataset in data.lerobot_datasets]
    else:
        raise ConfigurationError(Problem("", f"unknown kind of data {data.kind!r}", "one of sample, lerobot, synthetic"))
    return MixtureSamples(select_datasets(opened, validation=data.validation, seed=seed), spec, seed, data.tokenizer_file)
