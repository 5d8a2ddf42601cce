"""Ranks of a test are ended when they make no progress, however long they take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support import ranks
from tests.support.ranks import STALL_LIMIT_S, StallLimit


def test_work_that_gets_little_of_a_busy_machine_is_not_ended() -> None:
    """A second of processor time in four minutes, for a day."""
    now, cpu_s = 0.0, 0.0
    limit = StallLimit(lambda: cpu_s, lambda: now)
    for _ in range(360):
        now, cpu_s = now + STALL_LIMIT_S * 0.8, cpu_s + 1.0
        assert not limit.exceeded()


def test_ranks_that_only_poll_are_ended_after_the_limit() -> None:
    """Threads that look for a signal now and then take a millisecond of processor time a second."""
    now, cpu_s = 0.0, 0.0
    limit = StallLimit(lambda: cpu_s, lambda: now)
    while not limit.exceeded():
        now, cpu_s = now + 10.0, cpu_s + 0.01
    assert STALL_LIMIT_S < now <= STALL_LIMIT_S + 10.0


def test_ranks_without_progress_fail_their_test(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STALL_LIMIT_S", -1.0)
    monkeypatch.setattr(ranks, "STALL_POLL_S", 0.0)
    ended: list[bool] = []

    def start(job: object) -> SimpleNamespace:
        job.group_log.write_text("the last line")  # type: ignore[attr-defined]
        return SimpleNamespace(_leader=0, poll=lambda: None, end=lambda: ended.append(True))

    monkeypatch.setattr(ranks, "_launcher", lambda: SimpleNamespace(start=start))
    with pytest.raises(pytest.fail.Exception, match="ranks made no progress for -1 s:\nthe last line"):
        ranks.run_ranks(2, tmp_path / "script.py")
    assert ended == [True]
