"""The limit on ranks without progress while one of them waits for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from benchbox.launch.job import Job
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.supervise.watch import _hang_limit_s
from benchbox.registry.phases import CHECKPOINT, CHECKPOINT_LIMIT_S, RankState

JOB = Job(config={"kind": "look"}, ranks=2, folder=Path("job"), timeout_s=None, hang_after_s=3.0)


def traces(*stages: str) -> list[Trace]:
    return [Trace(rank, state=RankState(stage, None, None, None, 0.0)) for rank, stage in enumerate(stages)]


def test_ranks_may_wait_for_a_checkpoint_until_they_give_up_themselves() -> None:
    assert _hang_limit_s(JOB, traces("train", CHECKPOINT)) > CHECKPOINT_LIMIT_S
    assert _hang_limit_s(JOB, traces("train", "train")) == 3.0


def test_a_rank_that_is_done_excuses_none_that_is_stuck() -> None:
    """The stage `write` is that of its result, and a checkpoint was the last that it waited for."""
    assert _hang_limit_s(JOB, traces("write", "probe")) == 3.0
    done, stuck = traces(CHECKPOINT, "train")
    done.final_event = "done"
    assert _hang_limit_s(JOB, [done, stuck]) == 3.0
