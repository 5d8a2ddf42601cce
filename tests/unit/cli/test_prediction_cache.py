"""Predictions in the user's cache: read back for the same cell, step, device, sources and data, and for nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from benchbox.cli.predicting import predict_cells, predict_largest_batches, predict_run, rank_limit_bytes
from benchbox.cli.prediction_cache import PredictionCache
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.store.predictions import read_predictions
from benchbox.store.run import RunStore
from benchbox.theory.prediction import Estimate
from tests.support.example_run import CELL, MEASURE, example_record, example_run
from tests.support.predictions import predicting_in_this_process

VALUE = replace(CELL, policy="value")
ESTIMATE = Estimate(
    peak_bytes=100,
    moment="backward",
    components={"parameters": 100},
    resident_bytes=10,
    logits_bytes=0,
    collectives={},
    model_flops=1,
    recomputed_flops=0,
    optimizer_bytes=1,
    world_size=2,
    total_numel=5,
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "benchbox" / "predictions"


def test_a_prediction_is_that_of_its_cell_device_and_under_zero3_its_step(folder):
    zero3 = replace(VALUE, backend="zero3")
    cache = PredictionCache((), 3)
    assert cache.read(VALUE) is None
    for cell in (VALUE, zero3):
        cache.write(cell, ESTIMATE)
        assert cache.read(cell) == PredictionCache((), 3).read(cell) == ESTIMATE
    names = {path.name for path in folder.rglob("*.json")}
    assert names == {f"{VALUE.cell_id}.cpu.json", f"{zero3.cell_id}.step3.cpu.json"}
    other_step = PredictionCache((), 4)
    assert (other_step.read(VALUE), other_step.read(zero3)) == (ESTIMATE, None)
    assert PredictionCache((), 3, "cuda").read(VALUE) is None
    assert cache.read(replace(VALUE, batch=3)) is None
    (path,) = folder.rglob(f"{VALUE.cell_id}.*")
    path.write_text(path.read_text().replace('"ddp"', '"zero2"'))
    assert PredictionCache((), 3).read(VALUE) is None, "the file is of another cell with the same id"


def test_a_prediction_with_a_backbone_that_begins_frozen_or_without_padding_is_that_of_its_step():
    frozen = replace(VALUE, optim=replace(VALUE.optim, freeze_backbone_steps=4))
    for cell in (frozen, replace(VALUE, padding="longest")):
        PredictionCache((), 5).write(cell, ESTIMATE)
        assert [PredictionCache((), step).read(cell) for step in (5, 3)] == [ESTIMATE, None]


def test_a_tokenizer_with_a_link_to_a_file_that_is_gone_has_predictions_too(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "weights").symlink_to(tokenizer / "gone")
    cell = replace(VALUE, data=replace(VALUE.data, tokenizer=str(tokenizer)))
    PredictionCache((), 3).write(cell, ESTIMATE)
    assert PredictionCache((), 3).read(cell) == ESTIMATE


def test_a_policy_that_is_not_found_leaves_the_predictions_of_others():
    PredictionCache((), 3).write(VALUE, ESTIMATE)
    gone = replace(VALUE, policy="gone")
    with predicting_in_this_process():
        predictions = predict_cells([VALUE, gone], (), 3)
    assert predictions[VALUE.cell_id] == ESTIMATE
    assert "unknown policy 'gone'" in predictions[gone.cell_id]


@pytest.fixture
def predicting(tmp_path):
    """A command that waits for a process that predicts, and that process."""
    script = """
import sys, time
from pathlib import Path
from benchbox.cli.predicting import _in_process

def predict():
    Path(sys.argv[1]).touch()
    time.sleep(3600)

if __name__ == "__main__":
    _in_process(predict)
"""
    (tmp_path / "waits.py").write_text(script)
    command = subprocess.Popen([sys.executable, tmp_path / "waits.py", tmp_path / "began"], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "began").exists():
        assert command.poll() is None
        time.sleep(0.05)
    children = psutil.Process(command.pid).children()
    (predictor,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    yield command, predictor
    for process in (command, predictor):
        with suppress(psutil.Error):
            process.kill()


def test_an_interrupt_ends_the_process_that_predicts(predicting):
    command, predictor = predicting
    command.send_signal(signal.SIGINT)
    _, messages = command.communicate(timeout=60)
    assert "KeyboardInterrupt" in messages
    assert not predictor.is_running()


def test_a_command_that_is_killed_leaves_no_process_that_predicts(predicting):
    command, predictor = predicting
    command.kill()
    command.communicate(timeout=60)  # its output ends with the last process that has it
    predictor.wait(timeout=60)
    assert not predictor.is_running()


def test_another_policy_or_a_dataset_that_was_edited_needs_a_new_prediction(tmp_path, policy_dir):
    meta = tmp_path / "data" / "meta" / "info.json"
    meta.parent.mkdir(parents=True)
    meta.write_text("{}")
    cell = replace(CELL, policy="stand_in", data=DataSpec(kind="lerobot", path=str(tmp_path / "data")))
    PredictionCache((policy_dir,), 3).write(cell, ESTIMATE)
    assert PredictionCache((policy_dir,), 3).read(cell) == ESTIMATE
    meta.write_text("{ }")
    assert PredictionCache((policy_dir,), 3).read(cell) is None
    PredictionCache((policy_dir,), 3).write(cell, ESTIMATE)
    (policy_dir / "stand_in" / "policy.py").write_text("def build(preset, axes): return None\n")
    assert PredictionCache((policy_dir,), 3).read(cell) is None


@pytest.mark.parametrize("kind", ["tokenizer", "keep"])
def test_a_file_of_samples_that_was_replaced_needs_a_new_prediction(tmp_path, kind):
    file = tmp_path / "file"
    file.write_text("{}")
    if kind == "tokenizer":
        data = replace(VALUE.data, tokenizer=str(file))
    else:
        data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(tmp_path / "data"), keep=str(file)),))
    cell = replace(VALUE, data=data)
    PredictionCache((), 3).write(cell, ESTIMATE)
    assert PredictionCache((), 3).read(cell) == ESTIMATE
    file.write_text("[]")  # as many bytes
    os.utime(file, (0, 0))
    assert PredictionCache((), 3).read(cell) is None


@pytest.mark.parametrize("changed", ["benchbox_sha256", "installed_version"])
def test_another_benchbox_or_other_libraries_need_a_new_prediction(changed, monkeypatch):
    PredictionCache((), 3).write(VALUE, ESTIMATE)
    assert PredictionCache((), 3).read(VALUE) == ESTIMATE
    monkeypatch.setattr(f"benchbox.cli.prediction_cache.{changed}", lambda *_: "another")
    assert PredictionCache((), 3).read(VALUE) is None


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "cache").write_text("a file")
    cache = PredictionCache((), 3)
    cache.write(VALUE, ESTIMATE)
    assert cache.read(VALUE) is None


def test_without_the_memory_of_a_device_no_largest_batch_is_predicted():
    predicted = predict_largest_batches([VALUE], (), 3, None, 8)
    assert predicted == {VALUE.cell_id: "the memory of the device is unknown"}


@pytest.mark.parametrize(("limit", "total", "smaller"), [(40, 80, 40), (100, 80, 80), (None, 80, 80), (None, None, None)])
def test_a_search_on_a_gpu_begins_below_its_limit_and_the_memory_of_the_device(limit, total, smaller, monkeypatch):
    monkeypatch.setattr("benchbox.cli.predicting.local_device", lambda: "cuda")
    monkeypatch.setattr("benchbox.launch.capacity.device_memory_bytes", lambda: total)
    assert rank_limit_bytes(limit) == smaller


@pytest.mark.parametrize(("cuda", "peak_bytes"), [(False, 100), (True, 200)])
def test_predictions_of_a_run_are_those_for_the_device_of_its_ranks(cuda, peak_bytes, tmp_path):
    """Cells that have not run, as those that `--only` left out, have none: tracing them takes seconds each."""
    store = RunStore(tmp_path / "run")
    store.write_run(example_run([VALUE, replace(VALUE, seed=1)]))
    store.write_record(example_record(VALUE, cuda=cuda))
    for device, peak in (("cpu", 100), ("cuda", 200)):
        PredictionCache((), MEASURE.probed_step, device).write(VALUE, replace(ESTIMATE, peak_bytes=peak))
    assert predict_run(store.path, ()).keys() == {VALUE.cell_id}
    assert read_predictions(store.path)[VALUE.cell_id]["peak_bytes"] == peak_bytes
