"""Audits, trackers and set-ups of real trainings."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.store.checkpoints import list_checkpoints
from benchbox.store.run import RunStore
from tests.support.checkpoints import checksums
from tests.support.commands import run_in_process as benchbox
from tests.support.metrics_rows import without_measurements
from tests.support.wandb_files import read_history

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.ranks

TRAINING = """
name: trial
policy: value
size: tiny
data: {validation: 0.5, workers: 0}
validation: {every: 3, max_samples: 4}
backend: ddp
world_size: 2
batch: 1
seed: 3
optim: {lr: 1.0e-3, warmup_steps: 2, total_steps: 8}
steps: 6
log_every: 2
checkpoint: {every: 6}
"""
TRACKERS = [name for name in ("tensorboard", "wandb", "trackio") if find_spec(name) is not None]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(package not in TRACKERS, reason=f"{package} is not installed: pip install 'benchbox[track]'")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(out: Path) -> list[dict[str, Any]]:
    return without_measurements(rows(out / "metrics.jsonl"))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("running") / "train.yaml"
    path.write_text(TRAINING)
    return path


@pytest.fixture(scope="module")
def plain(config: Path) -> Path:
    """The folder of a training without audits and trackers."""
    out = config.parent / "plain"
    done = benchbox("train", str(config), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def observed(config: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder and output of the same training with audits, and all trackers that are installed."""
    out = config.parent / "observed"
    sets = f"audit.every=3,trackers=[{','.join(TRACKERS)}]"
    variables = {"TRACKIO_DIR": str(out / "trackio"), "WANDB_MODE": "offline"}
    done = benchbox("train", str(config), "--out", str(out), "--set", sets, variables=variables)
    assert done.returncode == 0, done.stderr
    return out, done


def test_audits_and_trackers_change_no_bit_of_a_training(
    plain: Path, observed: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    """Losses and norms of every step, weights, masters, moments and generators of both ranks."""
    out, _ = observed
    assert results(out) == results(plain)
    assert [row["step"] for row in rows(plain / "validation.jsonl")] == [3, 6]
    ours, theirs = (list_checkpoints(folder / "checkpoints")[-1] for folder in (out, plain))
    assert checksums(ours) == checksums(theirs)


def test_every_audit_is_a_row_and_a_line(observed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """The findings are those of the rules: gradients of this recipe are reduced in 16 bits. Both ranks were observed."""
    out, done = observed
    audits = rows(out / "findings.jsonl")
    assert [audit["step"] for audit in audits] == [3, 6]
    for audit in audits:
        assert audit["problems"] == []
        assert 0.9 < audit["numbers"]["edq"] <= 1.01
        (reduced,) = [finding for finding in audit["findings"] if finding["code"] == "BXP302"]
        assert reduced["evidence"]["ranks"] == [0, 1]
    assert "audit after step 3: no errors or warnings, effective descent quality" in done.stdout


def test_a_row_says_epoch_waiting_memory_and_why_utilisation_is_unknown(plain: Path) -> None:
    first, *others = rows(plain / "metrics.jsonl")
    frames = json.loads((plain / "data.json").read_text())["datasets"][0]["training_frames"]
    assert [row["epoch"] for row in (first, *others)] == [round((step + 1) * 2 / frames, 4) for step in range(6)]
    assert all(row["data_wait_s"] > 0 for row in (first, *others))
    assert first["host_rss_bytes"] > 2**20
    assert (first["allocated_peak_bytes"], first["mfu"]) == (None, None)
    assert first["mfu_reason"] == "no peak is known for this cpu"


@needs("tensorboard")
def test_tensorboard_has_every_value_of_every_step(observed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _ = observed
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    for name in ("loss", "grad_norm", "lr", "data_wait_s"):
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        assert logged == [(row["step"], pytest.approx(row[name])) for row in rows(out / "metrics.jsonl")]
    assert "mfu" not in events.Tags()["scalars"], "it is unknown here"
    logged = [(event.step, event.value) for event in events.Scalars("validation/loss")]
    assert logged == [(row["step"] - 1, pytest.approx(row["loss"])) for row in rows(out / "validation.jsonl")]


@needs("wandb")
def test_wandb_has_every_value_of_every_step_offline(observed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, _ = observed
    (path,) = (out / "wandb").glob("offline-run-*/run-*.wandb")
    logged = [(values["_step"], values["loss"], values["host_rss_bytes"]) for values in read_history(path)]
    assert logged == [(row["step"], row["loss"], row["host_rss_bytes"]) for row in rows(out / "metrics.jsonl")]
    validated = {values["_step"]: values["validation/loss"] for values in read_history(path) if "validation/loss" in values}
    assert validated == {row["step"] - 1: row["loss"] for row in rows(out / "validation.jsonl")}


@needs("trackio")
def test_trackio_has_every_loss_of_training_and_validation(observed: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    import sqlite3

    out, _ = observed
    (path,) = (out / "trackio").glob("benchbox*.db")
    with sqlite3.connect(path) as database:
        logged = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics")]
    losses, validated = (
        sorted((step, values[name]) for step, values in logged if name in values) for name in ("loss", "validation/loss")
    )
    assert losses == [(row["step"], row["loss"]) for row in rows(out / "metrics.jsonl")]
    assert validated == [(row["step"] - 1, row["loss"]) for row in rows(out / "validation.jsonl")]


def test_an_error_of_the_audit_ends_the_training_with_code_4(config: Path, tmp_path: Path) -> None:
    """bf16_pure steps 16-bit weights. The rows are complete, and no checkpoint is saved after the finding."""
    sets = "recipe=bf16_pure,audit.every=3,checkpoint.every=3,backend=single,world_size=1,batch=2,log_every=5"
    done = benchbox("train", str(config), "--out", str(tmp_path), "--set", sets)
    assert done.returncode == 4, done.stderr
    codes = {finding["code"] for finding in rows(tmp_path / "findings.jsonl")[0]["findings"] if finding["severity"] == "error"}
    assert codes
    for code in codes:
        assert f"audit after step 3: error {code}" in done.stderr
    assert "the audit after step 3 ends the training" in done.stderr
    assert "no checkpoint" in done.stderr
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_training_file_is_measured_and_the_measured_cell_is_trained(config: Path, tmp_path: Path) -> None:
    """`run` of a training file, then `train --from` that run: one set-up, and bit-identical losses."""
    sets = "backend=single,world_size=1,measure.launches=1,measure.warmup_steps=1,measure.steps=2"
    measured = benchbox("run", str(config), "--out", str(tmp_path / "run"), "--set", sets)
    assert measured.returncode == 0, measured.stderr
    (record,) = RunStore(tmp_path / "run").records()
    prefix, out = record["cell_id"][:4], tmp_path / "out"
    options = ["--from", str(tmp_path / "run"), "--cell", prefix, "--steps", "3", "--set", "checkpoint.every=0"]
    trained = benchbox("train", *options, "--out", str(out))
    assert trained.returncode == 0, trained.stderr
    assert f"set-up: cell {record['cell_id']} of {tmp_path / 'run'}" in trained.stdout
    assert "not as measured" not in trained.stdout
    assert [row["loss"] for row in results(out)] == record["loss"]


def test_a_cell_is_named_unambiguously_and_was_measured(tmp_path: Path) -> None:
    """The published run has nine cells."""
    run = Path(__file__).parents[2] / "reports" / "backends"
    ids = sorted(RunStore(run).run().cells)
    shared = next(first[:1] for first, second in pairwise(ids) if first[0] == second[0])
    for cell, message in (
        (shared, f"cells of {run} begin so"),
        ("x", f"--cell x: {run} has no such cell"),
    ):
        refused = benchbox("train", "--from", str(run), "--cell", cell, "--steps", "1", "--out", str(tmp_path))
        assert refused.returncode == 2
        assert message in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
