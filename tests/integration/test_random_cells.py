"""Random cells run, or say why they cannot; and theory holds for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from benchbox.analysis.reconciliation import reconcile
from benchbox.analysis.summary import summarize
from benchbox.store.predictions import read_predictions
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.random_matrices import random_matrix

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive]

CELLS = 12


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_cells_run_as_predicted_or_say_why_they_cannot(tmp_path: Path, seed: int) -> None:
    matrix, folder = tmp_path / "matrix.yaml", tmp_path / "run"
    matrix.write_text(yaml.safe_dump(random_matrix(seed, CELLS)))
    variables = {"OMP_NUM_THREADS": "1", "BENCHBOX_ESTIMATE": "true"}
    done = run_in_process("run", matrix, "--out", folder, variables=variables)
    summaries = summarize(RunStore(folder).run(), list(RunStore(folder).records()))
    failed = {summary.cell_id: summary.status for summary in summaries if summary.status not in ("ok", "unsupported")}
    assert not failed, done.stdout
    measured = [summary for summary in summaries if summary.status == "ok"]
    assert len(measured) >= CELLS // 3, done.stdout
    predictions = read_predictions(folder)
    entries = [(summary.cell, entry) for summary in measured for entry in reconcile(predictions[summary.cell_id], summary)]
    assert sum(entry.verdict == "confirmed" for _, entry in entries) >= len(measured) // 2  # steps may be skipped
    assert [(cell, entry) for cell, entry in entries if entry.verdict == "refuted"] == []
