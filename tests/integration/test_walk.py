"""A walk to OOM by real launches, whose command is killed after the first of them and repeated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from benchbox.analysis.certificates import certificates
from benchbox.analysis.invariants import verify_run
from benchbox.analysis.summary import summarize
from benchbox.report.printed_tables import REPORT_INVARIANTS
from benchbox.store.predictions import read_predictions
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

MIB = 2**20
MATRIX = """
name: walk
policy: value
size: tiny
backend: single
world_size: 1
data: synthetic
axes:
  batch: {search: max, start: 2}
measure: {warmup_steps: 3, steps: 1, launches: 1, memory_limit: 11 MiB}
"""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, str, bytes]:
    """The run directory, the output of the command that ended the walk, and the record that the killed command left."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "walk.yaml").write_text(MATRIX)
    command = [sys.executable, "-m", "benchbox.cli.app", "run", str(folder / "walk.yaml"), "--out", str(folder / "run")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        records: list[Path] = []
        while not records and process.poll() is None:
            time.sleep(0.05)
            records = list((folder / "run").glob("cells/*/launch-1.json"))
        os.killpg(process.pid, signal.SIGKILL)
    before = records[0].read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BENCHBOX_ESTIMATE")  # which all tests have: predictions are the default
        done = run_in_process(*command[3:])
    assert done.returncode == 0, done.stderr
    assert records[0].read_bytes() == before, "the launch of the killed command was repeated"
    return RunStore(folder / "run"), done.stdout, before


def test_a_killed_walk_goes_on_to_its_certificate(walked: tuple[RunStore, str, bytes]) -> None:
    """Theory predicts the largest batch, so that three launches are enough; the record before the kill is one of them."""
    store, _, before = walked
    run, records = store.run(), list(store.records())
    (result,) = certificates(run, summarize(run, records))
    assert result.is_complete
    assert result.largest is not None
    assert result.error is not None
    assert result.largest.cell["batch"] == result.predicted_batch == 3
    assert (result.probes, [record["status"] for record in records]) == (3, ["ok", "ok", "oom"])
    assert result.limit_bytes == 11 * MIB
    assert 0 < (result.headroom_bytes or 0) < 3 * MIB
    assert (result.error["type"], result.error["rank"], result.error.get("stage")) == ("OutOfMemoryError", 0, "warmup")
    assert "aten." in (result.error.get("operation") or "")
    assert json.loads(before)["cell"]["batch"] == 2


def test_its_output_shows_the_certificate_and_the_mean_number_of_launches(walked: tuple[RunStore, str, bytes]) -> None:
    store, output, _ = walked
    assert "1 of 1 walks have a certificate" in output
    assert "3.00 launches each on average" in output
    assert "What did not run" not in (store.path / "report.md").read_text()


def test_what_fits_is_predicted_by_default(walked: tuple[RunStore, str, bytes]) -> None:
    store, _, _ = walked
    run = store.run()
    predictions = read_predictions(store.path)
    assert [run.cells[cell_id]["batch"] for cell_id in predictions] == [2, 3]
    assert "peak memory confirmed: 2" in (store.path / "report.md").read_text()


def test_every_invariant_holds(walked: tuple[RunStore, str, bytes]) -> None:
    verification = verify_run(walked[0], REPORT_INVARIANTS)
    assert verification.violations == ()
    assert verification.satisfied["a walk that has ended has both launches of its certificate"] == 1
    assert verification.satisfied["tables of the report follow from the records"] == 1
