"""Real launches that train something else than they are asked to are diverged, and a correct backend beside them is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.analysis.summary import summarize
from benchbox.errors import EXIT_THRESHOLD
from benchbox.launch.launch import launch_cell
from benchbox.launch.process.warm import ForkServerLauncher
from benchbox.report import write_reports
from benchbox.spec.cell import MeasureSpec
from benchbox.store.run import Run, RunStore
from tests.support.commands import run_in_process
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from benchbox.analysis.summary import CellSummary

POLICIES = Path(__file__).parent / "policies"
MEASURE = MeasureSpec(warmup_steps=1, steps=3, launches=1)
SPLITS = {"single": {"world_size": 1, "batch": 4}, "fsdp2": {"world_size": 2, "batch": 2}, "ddp": {"world_size": 2, "batch": 2}}

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    """A run of an honest policy, under a DDP that sums gradients as well, and of one whose dropout depends on the ranks."""
    points = [("honest", backend) for backend in SPLITS] + [("dropping", "single"), ("dropping", "fsdp2")]
    cells = [
        tiny_cell(policy="dropout", size=size, recipe="fp32", backend=backend, **SPLITS[backend]) for size, backend in points
    ]
    store = RunStore(tmp_path_factory.mktemp("run"))
    run = Run(
        name="faults",
        matrix_file="faults.yaml",
        matrix={"axes": {"backend": list(SPLITS)}},
        reference={"backend": "single"},
        thresholds=[],
        measure=asdict(MEASURE),
        cells={cell.cell_id: cell.to_dict() for cell in cells},
        skipped=[],
    )
    store.write_run(run)
    launcher = ForkServerLauncher(worker_module="tests.integration.unaveraged_worker")
    for cell in cells:
        folder = store.launch_dir(cell.cell_id, 1)
        record = launch_cell(cell, MEASURE, launch=1, folder=folder, launcher=launcher, policy_dirs=[POLICIES])
        assert record["status"] == "ok", record["error"]
        store.write_record(record)
    launcher.close()
    return store


@pytest.fixture(scope="module")
def summaries(store: RunStore) -> dict[tuple[str, str], CellSummary]:
    """(size, backend) -> the summary of its cell."""
    return {(summary.cell["size"], summary.cell["backend"]): summary for summary in summarize(store.run(), store.records())}


def test_a_backend_that_sums_gradients_is_diverged_by_its_gradient_norm(summaries: Any) -> None:
    """Its losses differ little: Adam does not see the scale of the gradients."""
    diverged = summaries["honest", "ddp"]
    assert diverged.status == "diverged"
    difference = diverged.equivalence.differences["grad_norm"]
    assert difference.values[0] == pytest.approx(1.0, abs=1e-4), "two ranks: twice the norm"
    assert not difference.is_within
    assert "its gradient norm differs by 100% of the reference's in step " in diverged.divergence


def test_a_policy_whose_dropout_depends_on_the_ranks_is_diverged_by_its_loss_in_the_first_step(summaries: Any) -> None:
    diverged = summaries["dropping", "fsdp2"]
    assert diverged.status == "diverged"
    difference = diverged.equivalence.differences["loss"]
    assert difference.values[0] > 100 * difference.tolerances[0]


def test_a_correct_backend_beside_them_is_equivalent(summaries: Any) -> None:
    equivalence = summaries["honest", "fsdp2"].equivalence
    assert (equivalence.verdict, equivalence.reference.cell["backend"]) == ("equivalent", "single")
    assert all(difference.is_within for difference in equivalence.differences.values())


def test_the_gate_fails_and_the_reports_say_why(store: RunStore) -> None:
    done = run_in_process("check", store.path, "--format", "json")
    assert done.returncode == EXIT_THRESHOLD, done.stderr
    rows = {row["cell"]: row for row in json.loads(done.stdout)["rows"]}
    found = {cell: row["found"] for cell, row in rows.items()}
    assert list(found.values()).count("diverged") == 2
    assert all("rounding explains" in row["note"] for row in rows.values() if row["found"] == "diverged")
    paths = write_reports(store.path)
    markdown, html = (path.read_text(encoding="utf-8") for path in (paths.markdown, paths.html))
    assert "5 cells: 2 reference, 1 equivalent, 2 diverged." in markdown
    assert '<b data-status="diverged">diverged</b>' in html
