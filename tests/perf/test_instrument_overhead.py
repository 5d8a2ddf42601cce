"""Cost of the instruments per step: bare and instrumented steps, interleaved in one process."""

from __future__ import annotations

import time
from contextlib import closing
from statistics import median

import pytest
import torch

from benchbox.measure.collective_times import CollectiveClock
from benchbox.measure.phases import NONE, PHASES, CombinedInstrument, PhaseClock, ProgressTracker
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell, DataSpec
from benchbox.store.rank_state import RankStateFile
from tests.support.ratios import record_ratio

pytestmark = pytest.mark.perf

ROUNDS = 9
ALLOWED = 0.01


@pytest.fixture
def session_and_stream():
    """(session, stream) of pi05 small on one thread, in float32: CPUs without bfloat16 instructions would take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cell = Cell(
        policy="pi05",
        size="small",
        backend="single",
        world_size=1,
        batch=1,
        recipe="fp32",
        data=DataSpec(kind="synthetic", workers=0),
    )
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        yield build_session(cell, policy, stream.statistics), stream
    torch.set_num_threads(threads)


def own_cost_s(instruments):
    """Seconds that a step of seven phases takes when nothing happens in them; the least of many, which noise only adds to."""
    costs = []
    for _ in range(50):
        before = time.perf_counter()
        for _ in range(20):
            with instruments.step():
                for phase in PHASES:
                    with instruments.phase(phase):
                        pass
        costs.append((time.perf_counter() - before) / 20)
    return min(costs)


def test_instruments_cost_at_most_one_percent_of_a_step_of_pi05_small(benchmark, capsys, session_and_stream, tmp_path):
    """Two estimates, each blind where the other sees. What the instruments do by themselves is timed alone, to the microsecond.
    What they do to the step around them shows between interleaved steps, whose ratio a busy machine scatters by more than the
    one percent in question: there the test fails when the 95% interval of the median lies above it.

    A round takes bare, instrumented, instrumented, bare, so that a drift within it cancels. Its time is this process's on the
    processor, which other processes disturb least.
    """
    session, stream = session_and_stream
    clock = PhaseClock(session.device)
    tracker = ProgressTracker(on_change=RankStateFile(tmp_path / "state").write)  # as in the worker
    instruments = CombinedInstrument(CollectiveClock(session.device), clock, tracker)
    ratios: list[float] = []
    bare_s: list[float] = []

    def timed(instrument):
        before = time.process_time()
        session.step(stream, instrument)
        return time.process_time() - before

    def one_round():
        bare, instrumented = timed(NONE), timed(instruments)
        instrumented += timed(instruments)
        bare += timed(NONE)
        ratios.append(instrumented / bare)
        bare_s.append(bare / 2)

    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=1)
    del ratios[0], bare_s[0]  # the warm-up
    assert len(clock.drain().step_s) == tracker.state.step == 2 * (ROUNDS + 1), "the instruments were really there"

    share = own_cost_s(instruments) / median(bare_s)
    lower, upper = sorted(ratios)[1], sorted(ratios)[-2]  # of nine, the second from each end bound the median with 96%
    record_ratio(benchmark, "instrumented_over_bare", ratios, better="lower")
    record_ratio(benchmark, "own_share_of_step", share, better="lower", goal=ALLOWED)
    with capsys.disabled():
        print(
            f"\ninstrumented / bare: {median(ratios):.4f} [{lower:.4f}, {upper:.4f}]; the instruments' own share: {share:.6f}"
        )
    assert share <= ALLOWED
    assert lower <= 1 + ALLOWED
