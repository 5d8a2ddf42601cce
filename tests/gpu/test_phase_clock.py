"""Times by CUDA events agree with the kernels of a profiler trace."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchbox.measure.phases import PhaseClock
from benchbox.session.build import build_cell_policy, build_session, open_cell_data
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PHASES_MS = {"forward": 10, "backward": 20, "optimizer": 5}
LEAD_MS = 50  # of device work ahead of a timed part, so that the host has submitted it before the device begins it
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def sleep(cuda: torch.device) -> Callable[[float], None]:
    """A function that keeps the stream busy for about so many milliseconds, by one kernel."""
    cycles = 10**8
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    per_ms = cycles / start.elapsed_time(end)
    return lambda milliseconds: torch.cuda._sleep(int(milliseconds * per_ms))


def spins(work: Callable[[], object], folder: Path) -> list[tuple[float, float]]:
    """Run `work` under the profiler and return start and end, in seconds, of every kernel of `sleep`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert kernels, "the profiler recorded no kernel: CUPTI does not work on this machine"
    times_us = [(event["ts"], event["ts"] + event["dur"]) for event in kernels if "spin_kernel" in event["name"]]
    return sorted((start / 1e6, end / 1e6) for start, end in times_us)


def test_a_phase_lasts_as_long_as_its_kernels(cuda: torch.device, sleep: Callable[[float], None], tmp_path: Path) -> None:
    clock, steps = PhaseClock(cuda), 3

    def run() -> None:
        for _ in range(steps):
            sleep(LEAD_MS)
            with clock.step():
                for name, milliseconds in PHASES_MS.items():
                    with clock.phase(name):
                        sleep(milliseconds)

    run()  # the first launch of a kernel loads it
    clock.drain()
    kernels = spins(run, tmp_path)
    times = clock.drain()
    per_step = 1 + len(PHASES_MS)
    assert len(kernels) == steps * per_step
    for step in range(steps):
        _, *timed = kernels[step * per_step : (step + 1) * per_step]
        assert times.step_s[step] == pytest.approx(timed[-1][1] - timed[0][0], rel=TOLERANCE)
        for name, (start, end) in zip(PHASES_MS, timed, strict=True):
            assert times.phases_s[name][step] == pytest.approx(end - start, rel=TOLERANCE), name


def test_a_training_step_lasts_as_long_as_in_the_trace(
    cuda: torch.device, sleep: Callable[[float], None], tmp_path: Path
) -> None:
    """Between the kernel before a step and the one after it, and its phases add up to it."""
    cell = tiny_cell(size="small", backend="single", world_size=1, batch=16)
    policy = build_cell_policy(cell)
    clock, steps = PhaseClock(cuda), 3
    with closing(open_cell_data(cell, policy, rank=0)) as stream:
        session = build_session(cell, policy, stream.statistics)

        def run() -> None:
            for _ in range(steps):
                sleep(LEAD_MS)
                session.step(stream, clock)
                sleep(1)

        run()
        clock.drain()
        kernels = spins(run, tmp_path)
        times = clock.drain()
    assert len(kernels) == 2 * steps
    for step in range(steps):
        (_, start), (end, _) = kernels[2 * step : 2 * step + 2]
        assert times.step_s[step] == pytest.approx(end - start, rel=TOLERANCE)
        # The host leaves gaps between phases, in a small policy more than elsewhere.
        assert sum(seconds[step] for seconds in times.phases_s.values()) == pytest.approx(times.step_s[step], rel=0.05)
