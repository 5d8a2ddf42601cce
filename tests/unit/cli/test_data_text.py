"""Texts of `benchbox data` about the loading of a dataset and about attempts of a recording."""

from __future__ import annotations

import pytest

from benchbox.cli.data import MAX_DECODED_PER_USED, _print_attempt, _print_loading
from benchbox.data.loading.bench import LoadingCost, LoadingRate, LoadingReport
from benchbox.data.writing.recording import Attempt

RATES = [LoadingRate(order=order, workers=0, samples_per_s=100.0) for order in ("frame_shuffle", "episode_shuffle")]


@pytest.mark.parametrize(
    ("order", "decoded", "interval", "block", "hint"),
    [
        ("episode_shuffle", 3.0, 10, 16, "and a block has 16: a multiple of 10 decodes fewer frames"),
        ("episode_shuffle", 3.0, 10, 20, "and a block has 20: a larger one decodes fewer frames"),
        ("episode_shuffle", MAX_DECODED_PER_USED, 10, 16, None),
        ("episode_shuffle", 3.0, None, 16, None),
        ("frame_shuffle", 3.0, 10, 16, None),
    ],
)
def test_a_block_that_does_not_fit_the_key_frames_has_a_hint(order, decoded, interval, block, hint, capsys):
    cost = LoadingCost(order=order, seconds={"decode": 0.0004, "collate": 0.00002}, decoded_per_used=decoded)
    _print_loading(LoadingReport(rates=RATES, costs=[cost], key_frame_interval=interval), block)
    lines = capsys.readouterr().out.splitlines()
    assert f"{order}: microseconds of a sample in one process: decode 400, collate 20" in lines
    assert f"{order}: {decoded:.2f} frames decoded per frame used" in lines
    assert f"{order}: recommended data: {{workers: 0}}" in lines
    hints = [line for line in lines if "key frame" in line]
    assert hints == ([] if hint is None else [f"{order}: the videos have a key frame every 10 frames, {hint}"])


def test_an_attempt_says_whether_it_is_saved_and_who_made_it(capsys):
    _print_attempt(Attempt(env="reach", saved=2, discarded=1, frames=50, solved=True, stored=False), 5)
    _print_attempt(Attempt(env="reach", saved=2, discarded=2, frames=80, solved=False, stored=True), 5)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("reach: solved in 50 frames; 2 of 5 episodes, ")
    assert second.startswith("reach: not solved, discarded in 80 frames before the interruption; 2 of 5 episodes, ")
