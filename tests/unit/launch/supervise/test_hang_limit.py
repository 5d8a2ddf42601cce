"""The limit on ranks without progress, which depends on what they do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchbox.launch.job import Job
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.supervise.watch import _hang_limit_s
from benchbox.registry.phases import CHECKPOINT, CHECKPOINT_LIMIT_S, COMPILATION, RankState

JOB = Job(config={"kind": "look"}, ranks=2, folder=Path("job"), timeout_s=900.0, hang_after_s=3.0)
TRAINING = replace(JOB, timeout_s=None)


def traces(*stages: str) -> list[Trace]:
    return [Trace(rank, state=RankState(stage, None, None, None, 0.0)) for rank, stage in enumerate(stages)]


def test_ranks_may_wait_for_a_checkpoint_until_they_give_up_themselves() -> None:
    assert _hang_limit_s(JOB, traces("train", CHECKPOINT)) > CHECKPOINT_LIMIT_S
    assert _hang_limit_s(JOB, traces("train", "train")) == 3.0


def test_ranks_may_import_build_and_compile_for_any_time_while_others_wait_for_them_in_their_first_step() -> None:
    """Billions of parameters, or libraries on a network disk, show no progress for long, and not on every rank alike."""
    assert _hang_limit_s(JOB, [Trace(0), Trace(1)]) == math.inf, "ranks that still import"
    for first, second in product(("build", "compile_extension", "prepare"), repeat=2):
        assert _hang_limit_s(JOB, traces(first, second)) == math.inf, (first, second)
        assert _hang_limit_s(JOB, traces(first, "measure")) == math.inf, first
        assert _hang_limit_s(TRAINING, traces(first, "train")) == 3600.0, first


def test_a_training_which_has_no_timeout_is_given_up_after_an_hour_without_a_first_step() -> None:
    """Its dataset is on a server that does not answer, and its machines would be held for days."""
    waiting = [Trace(0), traces("prepare")[0]]
    assert _hang_limit_s(TRAINING, waiting) == 3600.0
    assert _hang_limit_s(replace(TRAINING, hang_after_s=7200.0), waiting) == 7200.0
    compiling = Trace(0, state=RankState("train", 1, 3, COMPILATION, 0.0))
    assert _hang_limit_s(TRAINING, [compiling]) == 3600.0


def test_a_rank_that_compiles_excuses_those_that_wait_for_its_collective() -> None:
    compiling, waiting = (Trace(rank, state=RankState("warmup", 1, 3, "backward", 0.0)) for rank in range(2))
    assert _hang_limit_s(JOB, [compiling, waiting]) == 3.0
    compiling.state = RankState("warmup", 1, 3, COMPILATION, 0.0)
    assert _hang_limit_s(JOB, [compiling, waiting]) == math.inf


def test_a_rank_that_is_done_excuses_none_that_is_stuck() -> None:
    """The stage `write` is that of its result, and a checkpoint was the last that it waited for."""
    assert _hang_limit_s(JOB, traces("write", "probe")) == 3.0
    for stage in (CHECKPOINT, "prepare"):
        done, stuck = traces(stage, "train")
        done.final_event = "done"
        assert _hang_limit_s(JOB, [done, stuck]) == 3.0
