"""Throughput of the training loop with its defaults, against a bare loop over the same session."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import count
from statistics import median

import pytest
import torch

from benchbox.measure.phases import CombinedInstrument, ProgressTracker
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

pytestmark = pytest.mark.perf

ROUNDS = 12
LOG_EVERY = TrainFile.model_fields["log_every"].default
REQUIRED = 0.98


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
    """Blocks of `log_every` steps, bare and in the loop as the worker calls it, alternate in one process. Least processor times
    are compared: other processes of the machine only add to them, and the device here is the processor.
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
    loop_s: list[float] = []
    starts = count(0, LOG_EVERY)

    def bare_block():
        before = time.process_time()
        for _ in range(LOG_EVERY):
            session.step(stream)
        bare_s.append(time.process_time() - before)

    def loop_block():
        start = next(starts)
        before = time.process_time()
        train(
            session,
            stream,
            start=start,
            steps=start + LOG_EVERY,
            metrics=metrics,
            checkpoints=None,
            instruments=instruments,
            after_step=reporter.report_progress,
            stopping=stop.agreed,
        )
        loop_s.append(time.process_time() - before)

    def one_round():
        bare_block()
        loop_block()
        loop_block()
        bare_block()

    benchmark.pedantic(one_round, rounds=ROUNDS, warmup_rounds=1)
    ratio = min(bare_s[2:]) / min(loop_s[2:])  # without the warm-up
    middle = median(bare_s[2:]) / median(loop_s[2:])
    benchmark.extra_info |= {"loop_over_bare": ratio, "median_ratio": middle}
    with capsys.disabled():
        print(
            f"\nthroughput of the loop / bare loop: {ratio:.4f} (medians {middle:.4f});"
            f" {min(loop_s[2:]) / LOG_EVERY * 1e3:.2f} against {min(bare_s[2:]) / LOG_EVERY * 1e3:.2f} ms a step"
        )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 * (ROUNDS + 1) * LOG_EVERY, "the loop was really run"
    assert ratio >= REQUIRED
