"""The compilation of DeepSpeed's CPU extension, as the launcher sees it."""

from __future__ import annotations

import io
import math
from pathlib import Path

from rich.console import Console

from benchbox.launch.job import Job
from benchbox.launch.progress import ConsoleProgress
from benchbox.launch.supervise.trace import Trace
from benchbox.launch.supervise.watch import _hang_limit_s
from benchbox.registry.phases import RankState
from tests.support.launchers import cell


def traces(*stages: str) -> list[Trace]:
    return [Trace(rank, state=RankState(stage, None, None, None, 0.0)) for rank, stage in enumerate(stages)]


def test_it_is_one_line_even_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream, width=200), lambda cell: cell.size)
    progress.launch_started(cell("healthy"), 1)
    for stages in (
        ("build", "build"),
        ("compile_extension", "prepare"),
        ("compile_extension", "prepare"),
        ("prepare", "prepare"),
    ):
        progress.ranks_progressed(traces(*stages))
    assert stream.getvalue() == "healthy #1: compiling DeepSpeed's CPU extension, once per environment\n"


def test_it_is_no_hang_however_long_it_takes() -> None:
    job = Job(config={"kind": "look"}, ranks=2, folder=Path("job"), timeout_s=900.0, hang_after_s=3.0)
    assert _hang_limit_s(job, traces("compile_extension", "compile_extension")) == math.inf
    assert _hang_limit_s(job, traces("measure", "measure")) == 3.0


def test_a_rank_that_compiles_is_behind_one_that_prepares() -> None:
    compiling, preparing = traces("compile_extension", "prepare")
    assert compiling.state is not None
    assert preparing.state is not None
    assert compiling.state.order < preparing.state.order
