"""The rank that the others wait for is named with the part of the step it is behind in, and chance names none."""

from __future__ import annotations

import random

import pytest

from benchbox.analysis.stragglers import OWN_PARTS, describe_ranks, find_straggler
from benchbox.analysis.summary import summarize
from benchbox.registry.phases import STEP_PARTS
from tests.support.example_run import CELL, example_record, example_run

STEP = {"data_wait": 0.005, "compute": 0.05, "core_wait": 0.002, "rank_wait": 0.003, "transfer": 0.01}


def split(ranks=2, steps=12, noise=0.3, seed=0, step=STEP, **slower):
    """Return a split whose parts scatter; `slower` are seconds to add to a part of the last rank."""
    rng = random.Random(seed)

    def times(part, rank):
        added = slower.get(part, 0.0) if rank == ranks - 1 else 0.0
        return [step[part] * rng.uniform(1 - noise, 1 + noise) + added for _ in range(steps)]

    return {part: {"per_rank": [times(part, rank) for rank in range(ranks)]} for part in STEP_PARTS}


def sentence(*splits):
    records = [
        example_record(launch=launch) | {"step_split_s": value, "steps": len(value["compute"]["per_rank"][0])}
        for launch, value in enumerate(splits, start=1)
    ]
    run = example_run([CELL], measure={"warmup_steps": 1, "steps": 4, "launches": len(splits)})
    return describe_ranks(summarize(run, records)[0])


@pytest.mark.parametrize("part", OWN_PARTS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_rank_and_the_part_it_is_behind_in_are_named(part, ranks):
    straggler = find_straggler(split(ranks, **{part: 0.05}))
    assert (straggler.rank, straggler.part) == (ranks - 1, part)
    assert straggler.lag_s == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("part", ["rank_wait", "transfer"])
def test_a_rank_that_waits_for_others_is_not_named(part):
    assert find_straggler(split(**{part: 0.05})) is None


@pytest.mark.parametrize(("ranks", "steps"), [(2, 8), (2, 10), (4, 12)])
def test_equal_ranks_are_named_in_less_than_one_launch_of_a_hundred(ranks, steps):
    """Whichever rank and part chance has put behind."""
    equal_parts = dict.fromkeys(STEP_PARTS, 0.02)
    splits = (split(ranks, seed=seed, steps=steps, noise=0.5, step=equal_parts) for seed in range(1000))
    named = sum(find_straggler(launch) is not None for launch in splits)
    assert named < 10, f"{named} of 1000"


def test_a_rank_that_is_behind_by_too_little_to_matter_is_not_named():
    assert find_straggler(split(noise=0.001, compute=0.002)) is None
    assert find_straggler(split(noise=0.001, compute=0.006)).rank == 1


def test_a_rank_whose_parts_outweigh_one_another_is_not_named():
    """It computes longer, and waits for data as much less: no rank waits for it."""
    step = STEP | {"data_wait": 0.02}
    assert find_straggler(split(noise=0.001, step=step, compute=0.006, data_wait=-0.0059)) is None
    assert find_straggler(split(noise=0.001, step=step, compute=0.006)).part == "compute"


def test_ten_steps_name_one_of_four_ranks_that_compute_and_wait_for_data():
    """A matrix measures as many by default. Parts that take no time are no tests."""
    assert find_straggler(split(4, steps=10, compute=0.05)).rank == 3


def test_a_part_is_tested_beside_noise_of_the_others():
    """A busy host, on which the time without a core scatters by more than the rank is behind."""
    noisy = split(steps=14, noise=0.01, data_wait=0.02)
    noisy["core_wait"]["per_rank"] = [[0.04 * (step % 3 == rank) for step in range(14)] for rank in range(2)]
    straggler = find_straggler(noisy)
    assert (straggler.rank, straggler.part) == (1, "data_wait")


def test_few_steps_name_no_rank():
    assert find_straggler(split(steps=7, noise=0.0, compute=0.05)) is None


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        ({"compute": 0.006}, "rank 1 computed 12% longer than the others: 6.00 ms a step"),
        ({"data_wait": 0.02}, "rank 1 waited 20.0 ms a step longer for data than the others"),
        ({"core_wait": 0.02}, "rank 1 had no core for 20.0 ms a step more than the others: something else ran on it"),
        ({"transfer": 0.06}, "the ranks wait for transfers: 40% of the step"),
        ({"rank_wait": 0.1}, "the ranks wait for one another: 44% of the step, and no rank is always the last"),
        ({}, None),
    ],
    ids=str,
)
def test_a_cell_has_one_sentence(slower, expected):
    assert sentence(split(noise=0.0, **slower)) == expected


def test_too_few_steps_do_not_say_that_no_rank_is_always_the_last():
    """One of two computes for 50 ms longer in each of five steps, of which chance explains as much."""
    expected = "the ranks wait for one another: 44% of the step; too few steps to say for which rank"
    assert sentence(split(noise=0.0, steps=5, rank_wait=0.1)) == expected
    assert sentence(split(noise=0.0, steps=8, rank_wait=0.1)).endswith("no rank is always the last")


def test_the_sentence_says_in_how_many_launches():
    slow, equal = split(noise=0.0, compute=0.05), split(noise=0.0)
    assert sentence(slow, slow) == "rank 1 computed 100% longer than the others: 50.0 ms a step"
    assert sentence(slow, equal).endswith(", in 1 of 2 launches")
