"""Telling which processes of a command trained together."""

from __future__ import annotations

from benchbox.audit.subjects.command.process_reports import ProcessReport, select_training, group_trainings, list_limitations, count_finished_ranks
from benchbox.observer.facts import RankFacts, StepFacts


def sighting(began, rank, world_size, *, job="host 1", steps=3):
    courses = tuple(StepFacts(step=step) for step in range(1, steps + 1))
    return ProcessReport(began, job, RankFacts(rank=rank, world_size=world_size, source="command", steps=courses))


def test_ranks_of_one_job_are_one_training_in_rank_order():
    (training,) = group_trainings([sighting(2.0, 1, 2), sighting(3.0, 0, 2)])
    assert [facts.rank for facts in training.ranks] == [0, 1]
    assert (training.steps, training.world_size) == (3, 2)


def test_a_rank_that_comes_again_begins_another_training():
    """Pretraining, then fine-tuning, by the same launcher and port."""
    found = group_trainings([sighting(began, rank, 2) for began, rank in ((1, 0), (2, 1), (10, 1), (11, 0))])
    assert [[facts.rank for facts in training.ranks] for training in found] == [[0, 1], [0, 1]]


def test_jobs_that_run_side_by_side_are_told_apart():
    found = group_trainings(
        [sighting(1, 0, 2, job="a"), sighting(2, 0, 2, job="b"), sighting(3, 1, 2, job="b"), sighting(4, 1, 2, job="a")]
    )
    assert [len(training.ranks) for training in found] == [2, 2]


def test_of_several_trainings_the_last_with_most_steps_is_judged():
    first, second, third = group_trainings([sighting(1, 0, 1, steps=5), sighting(2, 0, 1, steps=5), sighting(3, 0, 1, steps=1)])
    assert select_training([first, second, third]) is second


def test_steps_are_through_once_every_rank_of_a_world_is(tmp_path):
    for mark, ranks in (("through-1-2", 0), ("through-0-4", 0), ("through-0-2", 2)):
        (tmp_path / mark).touch()
        assert count_finished_ranks(tmp_path) == ranks


def test_a_part_of_a_training_is_not_taken_for_the_whole():
    """Two of four ranks, as on one of two machines, and a command that ended early."""
    (training,) = group_trainings([sighting(1, 0, 4), sighting(2, 1, 4)])
    (ranks, steps) = list_limitations(training, of=1, steps=20)
    assert ranks.startswith("2 of 4 ranks were seen")
    assert steps.startswith("3 of 20 steps were seen")
    assert not list(list_limitations(*group_trainings([sighting(1, 0, 1)]), of=1, steps=3))
