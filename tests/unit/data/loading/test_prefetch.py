"""A batch is copied to a device while the batch before it is used. The copier here stands in for a GPU's, and keeps a log."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from benchbox.data.loading.loader import MicroBatchStream, load_samples
from benchbox.data.order.frames import FrameOrder, MicroBatchSampler
from benchbox.data.order.groups import generated_group
from benchbox.data.samples.description import DataUse, describe_data
from benchbox.data.samples.provenance import Provenance
from benchbox.errors import DataError
from benchbox.spec.cell import DataSpec

SAMPLES = 12


class LoggingCopier:
    def __init__(self):
        self.log = []

    def start(self, batch):
        self.log.append(("start", batch["number"].tolist()))
        return {name: tensor.clone() for name, tensor in batch.items()}

    def finish(self, copy):
        self.log.append(("finish", copy["number"].tolist()))
        return copy


class Numbers:
    """Samples that are their index; one of them is damaged."""

    statistics = ()
    provenance = Provenance()
    decoder = None

    def __init__(self, damaged=None):
        self.damaged = damaged

    def groups(self):
        return [generated_group(SAMPLES)]

    def episode_of(self, index):
        return index

    def sample(self, epoch, index):
        if index == self.damaged:
            raise DataError(f"sample {index} is damaged")
        zero = torch.tensor(0)
        return {"number": torch.tensor(index), "dataset_index": zero, "episode_index": torch.tensor(index)}


def open_numbers(copier, damaged=None):
    samples = Numbers(damaged)
    order = FrameOrder(samples.groups(), 0, shuffled=False)
    sampler = MicroBatchSampler(order=order, batch=2, accumulation=1, rank=0, world_size=1, start_step=0)
    data_use = DataUse({**describe_data(DataSpec(), samples), "datasets": [{}]})
    return MicroBatchStream(load_samples(samples, sampler, workers=0), samples, data_use, copier)


def test_one_batch_is_copied_ahead_and_the_batches_are_the_same():
    copier = LoggingCopier()
    stream = open_numbers(copier)
    first = next(stream)["number"].tolist()
    assert copier.log == [("start", [0, 1]), ("finish", [0, 1]), ("start", [2, 3])]
    batches = [first, *(batch["number"].tolist() for batch in islice(stream, 4))]
    assert batches == [batch["number"].tolist() for batch in islice(open_numbers(None), 5)]
    assert [batch for action, batch in copier.log if action == "finish"] == batches


def test_an_error_in_the_batch_ahead_is_raised_where_that_batch_is_due():
    stream = open_numbers(LoggingCopier(), damaged=5)
    assert [next(stream)["number"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match="sample 5 is damaged"):
        next(stream)


def test_a_batch_that_no_step_took_is_not_counted():
    stream = open_numbers(LoggingCopier())
    list(islice(stream, 3))
    assert [dataset["drawn"] for dataset in stream.data_use.record()["datasets"]] == [6]


def test_a_closed_stream_yields_no_batch_that_was_copied_ahead():
    stream = open_numbers(LoggingCopier())
    next(stream)
    stream.close()
    assert list(stream) == []
