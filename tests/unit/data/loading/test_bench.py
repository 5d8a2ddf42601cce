"""Measurements of loading: rates, costs, and the number of workers that they recommend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.data import open_dataset
from benchbox.data.loading.bench import LoadingRate, StageClock, measure_loading, recommend_workers
from benchbox.data.sample import sample_path
from benchbox.data.samples.windows import DatasetSamples
from benchbox.data.video.files import VideoReader
from benchbox.spec.cell import DataSpec


def rates(**samples_per_s):
    return [
        LoadingRate(order="frame_shuffle", workers=int(name.removeprefix("w")), samples_per_s=value)
        for name, value in samples_per_s.items()
    ]


@pytest.mark.parametrize(
    ("measured", "cores", "workers"),
    [
        (rates(w0=100, w1=96, w2=104), 8, 0),
        (rates(w0=50, w1=96, w2=100), 8, 1),
        (rates(w0=50, w1=90, w2=100), 8, 2),
        (rates(w0=50, w1=90, w2=100), 2, 1),  # a core is left for the training
        (rates(w0=50, w1=90), 1, 0),
        (rates(w4=50, w2=90), 2, 2),  # all are too many: the least of them
    ],
)
def test_the_fewest_workers_within_a_twentieth_of_the_best_are_recommended(measured, cores, workers):
    assert recommend_workers(measured, cores) == workers


def test_a_dataset_is_measured_in_every_order_with_every_number_of_workers(bare_spec):
    data = DataSpec(kind="lerobot", path=str(sample_path()), buffer=64)
    orders = ["frame_shuffle", "episode_shuffle"]
    begun = []
    spec = replace(bare_spec, history=1)
    loading = measure_loading(data, spec, orders=orders, workers=[0, 1], batch=4, seconds=0.05, on_progress=begun.append)
    assert [(rate.order, rate.workers) for rate in loading.rates] == [(order, count) for order in orders for count in (0, 1)]
    assert all(rate.samples_per_s > 0 for rate in loading.rates)
    assert len(begun) == 6
    frames, episodes = loading.costs
    assert frames.decoded_per_used > 3
    assert episodes.decoded_per_used <= 1.2
    for cost in loading.costs:
        assert list(cost.seconds) == ["read", "decode", "resize", "tokenise", "transport", "other"]
        assert all(seconds > 0 for seconds in cost.seconds.values())
        assert cost.seconds["decode"] > cost.seconds["read"]
    assert loading.key_frame_interval == 8


def test_stages_are_timed_only_inside_the_block(bare_spec):
    samples = DatasetSamples(open_dataset(sample_path()), bare_spec, seed=0)
    clock = StageClock()
    original = VideoReader.frame_at
    with clock.installed():
        samples.sample(0, 3)
    timed = dict(clock.seconds)
    samples.sample(0, 4)
    assert clock.seconds == timed
    assert timed["decode"] > 0
    assert VideoReader.frame_at is original
