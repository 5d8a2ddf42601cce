"""Tests of grouping the reports of a command's processes into trainings."""

from __future__ import annotations

from benchbox.audit.subjects.command.process_reports import (
    ProcessReport,
    count_finished_ranks,
    group_trainings,
    list_limitations,
    select_training,
)
from benchbox.observer.facts import RankFacts, StepFacts


def report(began, rank, world_size, *, job="host 1", steps=3):
    step_facts = tuple(StepFacts(step=step) for step in range(1, steps + 1))
    return ProcessReport(began, job, RankFacts(rank=rank, world_size=world_size, source="command", steps=step_facts))


def test_ranks_of_one_job_are_one_training_in_rank_order():
    (training,) = group_trainings([report(2.0, 1, 2), report(3.0, 0, 2)])
    assert [facts.rank for facts in training.ranks] == [0, 1]
    assert (training.steps, training.world_size) == (3, 2)


def test_a_rank_that_reports_again_begins_another_training():
    """Pretraining, then fine-tuning, by the same launcher and port."""
    trainings = group_trainings([report(began, rank, 2) for began, rank in ((1, 0), (2, 1), (10, 1), (11, 0))])
    assert [[facts.rank for facts in training.ranks] for training in trainings] == [[0, 1], [0, 1]]


def test_concurrent_jobs_are_separate_trainings():
    trainings = group_trainings(
        [report(1, 0, 2, job="a"), report(2, 0, 2, job="b"), report(3, 1, 2, job="b"), report(4, 1, 2, job="a")]
    )
    assert [len(training.ranks) for training in trainings] == [2, 2]


def test_the_latest_training_of_those_with_most_steps_is_judged():
    trainings = group_trainings([report(1, 0, 1, steps=5), report(2, 0, 1, steps=5), report(3, 0, 1, steps=1)])
    assert len(trainings) == 3
    assert select_training(trainings) is trainings[1]


def test_ranks_are_finished_once_every_rank_of_a_world_on_this_machine_is(tmp_path):
    for mark, ranks in (
        ("through-1-2-2", 0),
        ("through-0-4-4", 0),
        ("through-0-2-2", 2),
        ("through-4-8-4", 2),
        ("through-5-8-4", 2),
        ("through-6-8-4", 2),
        ("through-7-8-4", 4),  # the second of two machines
    ):
        (tmp_path / mark).touch()
        assert count_finished_ranks(tmp_path) == ranks


def test_ranks_of_several_launchers_on_this_machine_are_finished_too(tmp_path):
    """Their marks may all be there when they are looked for."""
    for rank in range(4):
        (tmp_path / f"through-{rank}-4-2").touch()
    assert count_finished_ranks(tmp_path) == 4


def test_a_partly_observed_training_is_reported_as_such():
    """Two of four ranks, as on one of two machines, and a command that ended early."""
    (training,) = group_trainings([report(1, 0, 4), report(2, 1, 4)])
    (ranks, steps) = list_limitations(training, trainings=1, steps=20)
    assert ranks.startswith("2 of 4 ranks were seen")
    assert steps.startswith("3 of 20 steps were seen")
    assert not list(list_limitations(*group_trainings([report(1, 0, 1)]), trainings=1, steps=3))
