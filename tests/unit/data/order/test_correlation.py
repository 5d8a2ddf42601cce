"""A stream whose consecutive batches are nearly of one episode is warned of, once, with the remedy."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from benchbox.data.loading.loader import open_stream
from benchbox.data.order.correlation import EpisodeCorrelation, matches_by_chance
from benchbox.data.order.groups import SampleGroup, generated_group
from benchbox.session import StepResult
from benchbox.spec.cell import DataSpec
from benchbox.trainer.metrics import MetricsLog


def stream_of(spec, order, batch=4, **options):
    data = DataSpec(kind="sample", workers=0, **options)
    return open_stream(data, spec, batch=batch, accumulation=1, rank=0, world_size=1, seed=0, order=order)


@pytest.mark.parametrize(
    ("order", "batch", "options", "is_warned_of"),
    [
        ("sequential", 4, {}, True),
        ("frame_shuffle", 4, {}, False),
        ("episode_shuffle", 4, {"buffer": 512}, False),
        ("episode_shuffle", 1, {"buffer": 1}, True),  # one block after another
    ],
)
def test_an_order_that_keeps_episodes_together_is_warned_of(bare_spec, order, batch, options, is_warned_of):
    stream = stream_of(bare_spec, order, batch, **options)
    list(islice(stream, 19))
    assert stream.episode_warning() is None, "too few batches to say"
    list(islice(stream, 31))
    warning = stream.episode_warning()
    assert (warning is not None) == is_warned_of
    if warning is not None:
        assert "nearly of one episode" in warning
        assert "set order: frame_shuffle, or episode_shuffle with a larger data.buffer" in warning


def test_a_dataset_of_one_episode_is_not_warned_of():
    correlation = EpisodeCorrelation(matches_by_chance([SampleGroup(generated_group(1).segments)], lambda index: index))
    for _ in range(30):
        correlation.add({"dataset_index": torch.zeros(2).long(), "episode_index": torch.zeros(2).long()})
    assert correlation.matches() == 1
    assert correlation.warning() is None


def test_chance_counts_weights_lengths_and_the_segments_of_one_episode():
    first = SampleGroup(generated_group(2).segments, weight=1)
    second = SampleGroup(generated_group(2).segments + 2, weight=3)
    assert matches_by_chance([first, second], lambda index: index) == pytest.approx(2 * (1 / 8) ** 2 + 2 * (3 / 8) ** 2)
    assert matches_by_chance([first, second], lambda index: index // 2) == pytest.approx(1 / 16 + 9 / 16)


def test_the_log_of_a_training_has_the_warning_once(tmp_path):
    texts = iter([None, "look", "again"])
    log = MetricsLog(tmp_path / "m.jsonl", start=0, block_steps=2, is_writer=True, warning=lambda: next(texts))
    for step in range(8):
        log.add(step, StepResult(torch.tensor(0.5), torch.tensor(1.0), {}, 8, (1e-4,), {}))
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row.get("warning") for row in rows] == [None, None, None, "look", None, None, None, None]


def test_episodes_of_one_number_in_two_datasets_are_not_the_same():
    correlation = EpisodeCorrelation(by_chance=0.0)
    for _ in range(2):
        correlation.add({"dataset_index": torch.tensor([0, 1]), "episode_index": torch.tensor([0, 0])})
    assert correlation.matches() == pytest.approx(1 / 3)  # of six pairs of four samples, two
