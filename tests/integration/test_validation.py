"""Validation by several ranks: every sample counts once, and training does not notice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.samples.selection import count_frames, select_frames
from benchbox.data.video.files import VideoWriter
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.store.checkpoints import list_checkpoints, read_manifest
from tests.support.commands import run_in_process
from tests.support.datasets import annotate, write_robot
from tests.support.ranks import RANK_SCRIPTS, run_ranks, tiny_cell
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from benchbox.spec.cell import Cell

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: pi0
size: tiny
data:
  mixture:
{robots}
  validation: 0.4
  workers: 1
backend: single
world_size: 1
batch: 2
steps: 4
log_every: 1
optim: {{ema_decay: 0.5}}
checkpoint: {{every: 2, keep: 3, keep_best: {{metric: flow}}}}
validation: {{every: 2, at_start: true, batch: 4}}
"""

BACKENDS = ("ddp", "fsdp1_full", "fsdp2", "zero2", "zero3")
DEFAULT_BACKENDS = ("ddp", "fsdp2", "zero3")
# Seeds choose validation episodes of different lengths; the others have fewer samples than ranks, or share them unevenly.
PASSES = [
    *({"seed": seed, "batch": batch, "max_samples": None} for seed, batch in ((0, 2), (1, 3), (2, 1))),
    *({"seed": 0, "batch": 2, "max_samples": number} for number in (1, 2, 5)),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """Two robots of three sources and two control modes, with weights. Every other frame of one has a response and a memory."""
    folder = tmp_path_factory.mktemp("mixture")
    one = write_robot(folder / "plain", cameras={"top": (16, 16)}, lengths=(4, 3, 5, 2, 6), level=90)
    columns = {name: [f"{name} {frame}" if frame % 2 else "" for frame in range(20)] for name in ("response", "memory")}
    annotated = annotate(one, folder / "annotated", columns)
    two = write_robot(folder / "other", cameras={"front": (16, 16)}, lengths=(3, 7, 2), state=2, action=4, level=30, scale=0.3)
    return DataSpec(
        kind="lerobot",
        datasets=(
            DatasetSpec(path=str(annotated), weight=2.0, control_mode="ee", source="lab"),
            DatasetSpec(path=str(two), weight=1.0, control_mode="joint", source="field"),
        ),
        validation=0.4,
        workers=0,
    )


def run(cells: list[tuple[str, Cell]], folder: Path) -> list[Any]:
    """Run the script as ranks, and return the result of every cell, each with what it is for."""
    (ranks,) = {cell.world_size for _, cell in cells}
    folder.mkdir()
    job = {"cells": [(mode, cell.to_dict()) for mode, cell in cells], "passes": PASSES, "out": str(folder)}
    (folder / "job.json").write_text(json.dumps(job))
    run_ranks(ranks, RANK_SCRIPTS / "validation.py", str(folder / "job.json"))
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(len(cells))]


@pytest.fixture(scope="module")
def results(data: DataSpec, tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> dict[int, tuple[Path, list[Any]]]:
    """Folder and results by the number of ranks: passes of pi05, and for one and three ranks of a policy without losses per
    sample; for two ranks a training of every backend."""
    folder = tmp_path_factory.mktemp("validation")
    policies = [tiny_cell(policy=policy, recipe="fp32", data=data) for policy in ("pi05", "pi07_high_level")]
    optim = replace(policies[0].optim, ema_decay=0.5)
    results = {}
    for ranks in (1, 2, 3, 4) if exhaustive else (1, 2, 3):
        chosen = policies if ranks in (1, 3) else policies[:1] if exhaustive else []
        cells = [("passes", replace(cell, world_size=ranks, backend="single" if ranks == 1 else "ddp")) for cell in chosen]
        if ranks == 2:
            trained = [
                tiny_cell(policy="pi0", backend=name, recipe="fp32", data=data, optim=optim)
                for name in (BACKENDS if exhaustive else DEFAULT_BACKENDS)
            ]
            cells += [("trainings", cell) for cell in trained]
        results[ranks] = folder / str(ranks), run(cells, folder / str(ranks))
    return results


@pytest.fixture(scope="module")
def rows(results: dict[int, tuple[Path, list[Any]]]) -> dict[int, list[list[dict[str, Any]]]]:
    """Rows of every pass by the number of ranks and the policy."""
    return {ranks: passes for ranks, (_, passes) in results.items()}


def train(config: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("train", config, "--out", out, *more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts(row: dict[str, Any]) -> Any:
    """Return all counts of a row."""
    groups = [row["unweighted"], *row["groups"], *row["sources"]]
    return row["samples"], [
        (group["samples"], [(term["samples"], term["count"]) for term in group["terms"].values()]) for group in groups
    ]


def sums(row: dict[str, Any]) -> list[float]:
    groups = [row["unweighted"], *row["groups"], *row["sources"]]
    terms = [term["sum"] for group in groups for term in group["terms"].values()]
    return [row["loss"], *row["terms"].values(), *row["parts"].values(), *(group["loss"] for group in groups), *terms]


@pytest.mark.parametrize("ranks", in_tiers([2, 3, 4], (3).__eq__))
def test_any_number_of_ranks_has_the_counts_and_sums_of_one(rows: Any, ranks: int) -> None:
    for options, alone, together in zip(PASSES, rows[1][0], rows[ranks][0], strict=True):
        assert alone["per_sample"] is together["per_sample"] is True
        assert counts(together) == counts(alone), options
        assert sums(together) == pytest.approx(sums(alone), rel=1e-6), options


def test_a_policy_without_losses_per_sample_has_the_mean_over_all_samples(rows: Any) -> None:
    for options, alone, together in zip(PASSES, rows[1][1], rows[3][1], strict=True):
        assert together["per_sample"] is False
        assert together["reason"] == (
            "pi07_high_level returns no losses per sample: means are over all samples, without groups"
        )
        assert together["samples"] == alone["samples"], options
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6), options
        assert together["terms"] == pytest.approx(alone["terms"], rel=1e-6), options
    assert len({row["loss"] for row in rows[1][1]}) > 3
    assert all(row["loss"] > 0 for row in rows[1][1] if row["terms"])


def test_every_validation_frame_counts_once_in_its_groups(rows: Any, data: DataSpec) -> None:
    for options, row in zip(PASSES, rows[3][0], strict=True):
        frames = [
            count_frames(select_frames(episodes, validation=0.4, seed=options["seed"], dataset=number).validation)
            for number, episodes in enumerate(open_dataset(dataset.path).episodes for dataset in data.datasets)
        ]
        assert row["samples"] == min(sum(frames), options["max_samples"] or 1000)
        if options["max_samples"] is None:
            assert [group["samples"] for group in row["groups"]] == frames
        for groups in (row["groups"], row["sources"]):
            assert sum(group["samples"] for group in groups) == row["samples"]
    (ee, joint), (lab, field) = rows[3][0][0]["groups"], rows[3][0][0]["sources"]
    assert (ee["control_mode"], joint["control_mode"]) == ("ee", "joint")
    assert (lab["source"], field["source"]) == ("lab", "field")
    assert lab["loss"] == ee["loss"] != joint["loss"]


def test_the_loss_weighs_datasets_as_training_draws_them_and_is_no_mean_of_batches(rows: Any) -> None:
    """Two datasets have the weights 2 and 1, and different numbers of validation frames."""
    for row in rows[3][0]:
        groups = row["groups"]
        if len(groups) == 2:
            assert [entry["weight"] for entry in row["weights"]] == pytest.approx([2 / 3, 1 / 3])
            assert row["loss"] == pytest.approx((2 * groups[0]["loss"] + groups[1]["loss"]) / 3, rel=1e-12)
            assert row["loss"] != pytest.approx(row["unweighted"]["loss"], rel=1e-5)
        else:
            assert row["loss"] == pytest.approx(groups[0]["loss"], rel=1e-12), "a dataset without samples has no weight"
        total = sum(group["samples"] * group["loss"] for group in groups)
        assert row["unweighted"]["loss"] == pytest.approx(total / row["samples"], rel=1e-12)


def test_the_unweighted_loss_is_the_training_loss_of_the_same_samples_in_one_batch(rows: Any) -> None:
    for row in rows[1][0]:
        assert row["unweighted"]["loss"] == pytest.approx(row["batch_loss"], rel=1e-6)
    for row in rows[1][1]:
        assert row["loss"] == pytest.approx(row["batch_loss"], rel=1e-6), "without losses per sample"


@pytest.fixture(scope="module")
def trainings(results: dict[int, tuple[Path, list[Any]]], exhaustive: bool) -> dict[str, tuple[Path, Any]]:
    """The folder of every backend, and what its two ranks have after a training with validation, and after one without."""
    folder, values = results[2]
    trained = BACKENDS if exhaustive else DEFAULT_BACKENDS
    first = len(values) - len(trained)
    return {
        backend: (folder / f"{index}-with", result)
        for index, (backend, result) in enumerate(zip(trained, values[first:], strict=True), first)
    }


@pytest.mark.parametrize("backend", in_tiers(BACKENDS, DEFAULT_BACKENDS.__contains__))
def test_a_training_that_validates_is_the_training_that_does_not(trainings: Any, backend: str) -> None:
    """After validations of the averages and of the weights before the first step and after every step: losses, gradient norms,
    weights, moments, modes of all modules, shards and generators of every rank, bit for bit."""
    _, result = trainings[backend]
    assert len(result["with"]) == 2
    for validated, plain in zip(result["with"], result["without"], strict=True):
        assert validated == plain
    assert len(result["with"][0]["metrics"]) == 2


@pytest.mark.parametrize("backend", in_tiers(BACKENDS, DEFAULT_BACKENDS.__contains__))
def test_every_backend_validates_to_the_same_losses(trainings: Any, backend: str) -> None:
    """On a mixture of two datasets, two ranks each, as they train: to float32 rounding."""
    for name in ("validation", "averages"):
        expected, own = (lines(trainings[trained][0] / f"{name}.jsonl") for trained in ("ddp", backend))
        assert [row["step"] for row in own] == [0, 1, 2]
        assert len({row["loss"] for row in own}) == 3, "weights change"
        for reference, row in zip(expected, own, strict=True):
            assert counts(row) == counts(reference)
            assert sums(row) == pytest.approx(sums(reference), rel=1e-4)
    of_weights, of_averages = (lines(trainings[backend][0] / f"{name}.jsonl") for name in ("validation", "averages"))
    assert of_averages[0]["loss"] == of_weights[0]["loss"], "before the first step they are the weights"
    assert of_averages[2]["loss"] != pytest.approx(of_weights[2]["loss"], rel=1e-4)


def test_a_training_file_validates_shows_it_and_resumes(data: DataSpec, tmp_path: Path) -> None:
    """With loader processes. The last checkpoint is lost, so that the training resumes after two steps."""
    config = tmp_path / "train.yaml"
    robots = "".join(
        f"    - {{lerobot: {dataset.path}, weight: {dataset.weight}, source: {dataset.source}}}\n" for dataset in data.datasets
    )
    config.write_text(TRAINING.format(robots=robots))
    first = train(config, tmp_path / "out", "--set", "steps=3")
    assert first.returncode == 0, first.stderr
    shown = [line for line in first.stdout.splitlines() if line.startswith("validation ")]
    rows = lines(tmp_path / "out/validation.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 3], "at the start, after two steps, and at the end"
    for text, row in zip(shown, rows, strict=True):
        assert text.startswith(f"validation after {row['step']} steps: loss {row['loss']:.4f}  flow {row['terms']['flow']:.4f}")
        assert text.endswith(f"  {row['samples']} samples in {row['seconds']:.1f} s")
    scores = {path.name: read_manifest(path).score for path in list_checkpoints(tmp_path / "out/checkpoints")}
    assert scores == {f"step-{row['step']:08d}": row["terms"]["flow"] for row in rows if row["step"]}, "what keep_best compares"
    shutil.rmtree(tmp_path / "out/checkpoints/step-00000003")
    resumed = train(config, tmp_path / "out", "--resume", "--set", "validation.weights=averages")
    assert resumed.returncode == 0, resumed.stderr
    assert [row["step"] for row in lines(tmp_path / "out/validation.jsonl")] == [0, 2, 4]
    assert resumed.stdout.count("validation ") == 1
    assert resumed.stdout.count("validation of averages after 4 steps") == 1
    check_validated_checkpoints(tmp_path, lines(tmp_path / "out/validation.jsonl"), data)


@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_a_sample_that_one_rank_cannot_read_ends_a_validation_of_averages_as_that_error(backend: str, tmp_path: Path) -> None:
    """The other rank waits for the losses of the batch, and takes part in no collective that would put the weights back.

    The video lacks the last two frames of the last episode, which the last rank validates.
    """
    root = write_robot(tmp_path / "robot", cameras={"top": (16, 16)}, lengths=(4, 4, 4, 6))
    (video,) = root.rglob("*.mp4")
    writer = VideoWriter(video, fps=10, height=16, width=16)
    for index in range(16):
        writer.add(np.zeros((16, 16, 3), np.uint8), key_frame=index == 0)
    writer.close()
    episodes = open_dataset(root).episodes
    seed = next(seed for seed in count() if select_frames(episodes, validation=0.25, seed=seed).validation[-1][1] == 18)
    config = tmp_path / "train.yaml"
    config.write_text(TRAINING.format(robots=f"    - {{lerobot: {root}}}\n"))
    changes = f"backend={backend},world_size=2,seed={seed},hang_after_s=20,data.validation=0.25,data.workers=0"
    sets = ("--set", changes, "--set", "validation.weights=averages,validation.batch=1")
    done = train(config, tmp_path / "out", *sets)
    assert done.returncode == 2, done.stderr
    assert "error: crash: DataError: " in done.stderr
    assert "(rank 1, data_wait)" in done.stderr


def check_validated_checkpoints(folder: Path, rows: list[dict[str, Any]], data: DataSpec) -> None:
    """Check that `benchbox validate` finds the losses of the training in its checkpoints, and other losses in other data."""

    def validate(steps: int, *options: str) -> dict[str, Any]:
        path = folder / "record.json"
        checkpoint = folder / f"out/checkpoints/step-{steps:08d}"
        result = CliRunner().invoke(app, ["validate", str(checkpoint), "--workers", "0", "--out", str(path), *options])
        assert result.exception is None, result.exception
        record = json.loads(path.read_text())
        assert f"loss {record['loss']:.4f}  flow" in result.stdout
        return record

    for row, options in zip(rows[1:], ([], ["--ema"]), strict=True):
        record = validate(row["step"], "--batch", "4", *options)
        assert counts(record) == counts(row)
        assert sums(record) == pytest.approx(sums(row), rel=1e-6)
        assert record["evaluated_weights"] == row["evaluated_weights"]
        assert (record["checkpoint"]["steps"], record["episodes"]) == (row["step"], "validation")
    assert validate(4)["loss"] != pytest.approx(rows[2]["loss"], rel=1e-5), (
        "the weights, not their averages; equal ones agree to 1e-6"
    )
    other = data.datasets[1].path
    everything = validate(4, "--data", other, "--all-episodes")
    assert (everything["data"], everything["samples"]) == ([other], len(open_dataset(other)))
    assert [group["dataset"] for group in everything["groups"]] == [other]
    held_out = validate(4, "--data", other, "--batch", "4")
    (group,) = (group for group in rows[2]["groups"] if group["dataset"] == other)
    assert (held_out["data"], held_out["samples"]) == ([other], group["samples"])
    assert held_out["loss"] != pytest.approx(everything["loss"], rel=1e-5)
    assert validate(4, "--max-samples", "3")["samples"] == 3
