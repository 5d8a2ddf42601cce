"""Random modules train alike on every backend, and theory holds for them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
import yaml

from benchbox.analysis.reconciliation import reconcile
from benchbox.analysis.summary import summarize
from benchbox.store.predictions import read_predictions
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process
from tests.support.random_policies import write_random_policies

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive]

BACKENDS = ["ddp", "fsdp1_full", "fsdp2", "zero2", "zero3"]


@pytest.mark.parametrize("first", [0, 4])
def test_random_modules_have_the_same_losses_on_all_backends_and_peak_as_predicted(tmp_path: Path, first: int) -> None:
    sizes = write_random_policies(tmp_path, range(first, first + 4))
    matrix = {
        "name": "zoo",
        "policy": "./zoo",
        "data": "sample",
        "attention": "native",
        "recipe": "fp32",
        "world_size": 2,
        "batch": 2,
        "axes": {"size": sizes, "backend": BACKENDS},
        "measure": {"warmup_steps": 1, "steps": 3, "launches": 1},
    }
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(matrix))
    folder = tmp_path / "run"
    variables = {"OMP_NUM_THREADS": "1", "BENCHBOX_ESTIMATE": "true"}
    done = run_in_process("run", tmp_path / "matrix.yaml", "--out", folder, variables=variables)
    assert done.returncode == 0, done.stdout
    losses: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
    lowest_peaks = {}
    for record in RunStore(folder).records():
        losses[record["cell"]["size"]][record["cell"]["backend"]] = record["loss"]
        lowest_peaks[record["cell_id"]] = min(rank["allocated_peak_bytes"] for rank in record["memory"]["per_rank"])
    for size, by_backend in losses.items():
        assert by_backend.keys() == set(BACKENDS)
        for backend, loss in by_backend.items():
            assert loss == pytest.approx(by_backend["ddp"], rel=1e-5), (size, backend)
    predictions, summaries = read_predictions(folder), summarize(RunStore(folder).run(), list(RunStore(folder).records()))
    entries = [(summary, entry) for summary in summaries for entry in reconcile(predictions[summary.cell_id], summary)]
    assert len(entries) >= 2 * len(summaries)
    for summary, entry in entries:
        if entry.quantity == "peak memory":  # a thread of gloo may hold a buffer of one rank for longer: docs/theory.md
            assert lowest_peaks[summary.cell_id] == pytest.approx(entry.predicted, rel=0.01), (summary.cell, entry)
        else:
            assert entry.verdict != "refuted", (summary.cell, entry)
