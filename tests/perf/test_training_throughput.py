"""Throughput of the training loop with its defaults, against a bare loop over the same session."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import count
from statistics import median

import pytest
import torch

from benchbox.measure.phases import PHASES, CombinedInstrument, ProgressTracker
from benchbox.session import build_session
from benchbox.session.build import build_cell_policy, open_cell_data
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.train import TrainFile
from benchbox.store.events import EventWriter
from benchbox.store.rank_state import RankStateFile
from benchbox.trainer.gauges import DataWaitClock, TrainingGauges
from benchbox.trainer.loop import train
from benchbox.trainer.metrics import MetricsLog
from benchbox.trainer.stopping import AgreedStop
from benchbox.worker.reporting import Reporter
from tests.support.ratios import record_ratio

pytestmark = pytest.mark.perf

ROUNDS = 12
LOG_EVERY = TrainFile.model_fields["log_every"].default
OWN_BLOCKS = 30
REQUIRED = 0.98


class InstantSession:
    """Session whose step enters the phases of a step and returns what an earlier one returned."""

    def __init__(self, result, device):
        self.result = result
        self.device = device

    def step(self, micro_batches, instruments):
        with instruments.step():
            for phase in PHASES:
                with instruments.phase(phase):
                    pass
        return self.result


@pytest.fixture
def session_and_stream():
    """(session, stream) of pi05 tiny on one thread: the loop costs a step the same time, whatever the size of the policy is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cell = Cell(
        policy="pi05",
        size="tiny",
        backend="single",
        world_size=1,
        batch=1,
        data=DataSpec(kind="synthetic", workers=0),
    )
    policy = build_cell_policy(cell)
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        yield build_session(cell, policy, stream.statistics), stream
    torch.set_num_threads(threads)


def test_the_training_loop_reaches_98_percent_of_a_bare_loop(benchmark, capsys, session_and_stream, tmp_path):
    """Two estimates, each blind where the other sees. What the loop does by itself is timed around a step that does nothing, to
    the microsecond. What it does to the step inside shows between blocks of `log_every` steps, bare and in the loop as the
    worker calls it, whose ratio a machine scatters by several percent: there the test fails when the 96% interval of the median
    lies below the bound. A round takes bare, loop, loop, bare, so that a drift within it cancels. All times are this process's
    on the processor, which other processes disturb least, and which is the device here.
    """
    session, stream = session_and_stream
    tracker = ProgressTracker(on_change=RankStateFile(tmp_path / "state").write)
    reporter = Reporter(tracker, EventWriter(tmp_path / "events", 0))
    waits = DataWaitClock()
    gauges = TrainingGauges(
        waits, session.device, samples_per_step=1, samples_per_epoch=stream.samples_per_epoch, mfu=lambda _: (None, "no peak")
    )
    metrics = MetricsLog(
        tmp_path / "metrics.jsonl",
        start=0,
        block_steps=LOG_EVERY,
        is_writer=True,
        warning=stream.episode_warning,
        gauges=gauges,
    )
    stop = AgreedStop(lambda: False, None)
    instruments = CombinedInstrument(tracker, waits)
    tracker.enter("train", 1000)
    bare_s: list[float] = []
    ratios: list[float] = []
    starts = count(0, LOG_EVERY)

    def bare_block():
        before = time.process_time()
        for _ in range(LOG_EVERY):
            session.step(stream)
        return time.process_time() - before

    def loop_block(trained=session):
        start = next(starts)
        before = time.process_time()
        train(
            trained,
            stream,
            start=start,
            steps=start + LOG_EVERY,
            metrics=metrics,
            checkpoints=None,
            instruments=instruments,
            after_step=reporter.report_progress,
            stopping=stop.agreed,
        )
        return time.process_time() - before

    def one_round():
        bare, loop = bare_block(), loop_block()
        loop += loop_block()
        bare += bare_block()
        ratios.append(bare / loop)
        bare_s.append(bare / 2 / LOG_EVERY)

    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=1)
    del ratios[0], bare_s[0]  # the warm-up
    instant = InstantSession(session.step(stream), session.device)
    own_s = min(loop_block(instant) for _ in range(OWN_BLOCKS)) / LOG_EVERY
    share = own_s / min(bare_s)
    lower, upper = sorted(ratios)[2], sorted(ratios)[-3]  # of twelve, the third from each end bound the median with 96%
    record_ratio(benchmark, "loop_over_bare", ratios, better="higher")
    record_ratio(benchmark, "own_share_of_step", share, better="lower", goal=1 - REQUIRED)
    with capsys.disabled():
        print(
            f"\nthroughput of the loop / bare loop: {median(ratios):.4f} [{lower:.4f}, {upper:.4f}]; the loop's own share of a "
            f"step of {min(bare_s) * 1e3:.1f} ms: {share:.4f}"
        )
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == (2 * (ROUNDS + 1) + OWN_BLOCKS) * LOG_EVERY, "the loop was really run"
    assert share <= 1 - REQUIRED
    assert upper >= REQUIRED
