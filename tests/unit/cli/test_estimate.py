"""`benchbox estimate` and `plan --estimate`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchbox.cli import estimate_output
from benchbox.cli.app import app
from benchbox.cli.predicting import PredictionFailure, predict_cells
from benchbox.errors import ConfigurationError
from benchbox.plan import plan as plan_cells
from benchbox.registry.recipes import recipes
from benchbox.spec import load_matrix
from benchbox.spec.cell import Cell
from benchbox.store.predictions import write_predictions
from benchbox.store.run import RunStore
from benchbox.theory.links import DEVICES
from tests.support.example_run import CELL, example_record, example_run
from tests.support.predictions import predicting_in_this_process
from tests.unit.analysis.test_reconciliation import prediction_of

MATRIX = """
name: small
policy: vitra
size: tiny
data: synthetic
world_size: 2
batch: 1
axes: {backend: [ddp, fsdp2]}
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    path = tmp_path_factory.mktemp("matrix") / "small.yaml"
    path.write_text(MATRIX)
    return str(path)


def invoke(*arguments):
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def use_cache(monkeypatch, folder):
    """Give the user a cache, and return where its predictions are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("BENCHBOX_ESTIMATE", raising=False)
    return folder / "benchbox" / "predictions"


@pytest.fixture
def in_this_process():
    with predicting_in_this_process():
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Give the user an empty cache."""
    return use_cache(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def estimated(matrix, tmp_path_factory):
    """The cache that an estimate of the matrix has filled, in a process of its own as by default, and what it printed."""
    folder = tmp_path_factory.mktemp("estimated")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_cache(monkeypatch, folder)
        return folder, invoke("estimate", matrix)


@pytest.fixture
def filled_cache(estimated, tmp_path, monkeypatch):
    """Give the user the cache of that estimate."""
    return use_cache(monkeypatch, Path(shutil.copytree(estimated[0], tmp_path / "filled")))


@pytest.mark.usefixtures("filled_cache", "in_this_process")
def test_every_cell_has_its_components_and_the_bounds_of_its_time(matrix):
    cells = json.loads(invoke("estimate", matrix, "--format", "json", "--accelerator", "h200", "--link", "nvlink4"))
    assert [entry["cell"]["backend"] for entry in cells] == ["ddp", "fsdp2"]
    for entry in cells:
        prediction, time_s = entry["prediction"], entry["step_time_s"]
        assert sum(prediction["components"].values()) == prediction["peak_bytes"]
        assert 0 < time_s["lower"] <= time_s["upper"]
    text = invoke("estimate", matrix, "--only", "backend=ddp")
    assert "peak" in text
    assert "all_reduce" in text


@pytest.mark.usefixtures("filled_cache", "in_this_process")
def test_the_time_of_a_step_is_bounded_by_products_in_the_dtype_of_the_recipe(matrix, monkeypatch):
    """On an A100 those of float32 take 16 times as long."""
    options = ("--accelerator", "a100", "--link", "nvlink3", "--only", "backend=ddp")

    def estimate_as(recipe: str, *more: str) -> str:
        """Estimate a cell as if its recipe computed like another one, with the predictions that are there."""
        monkeypatch.setattr(estimate_output, "recipe_by_name", lambda _: recipes()[recipe])
        return invoke("estimate", matrix, *options, *more)

    cells = [json.loads(estimate_as(name, "--format", "json"))[0] for name in ("bf16_pure", "fp32")]
    communication_s = cells[0]["step_time_s"]["lower"]  # of a small policy it takes longer
    compute_s = [cell["step_time_s"]["upper"] - communication_s for cell in cells]
    prediction = cells[0]["prediction"]
    memory_s = prediction["optimizer_bytes"] / DEVICES["a100"].bytes_per_s
    assert compute_s[1] - memory_s == pytest.approx(16 * (compute_s[0] - memory_s), rel=0.01)
    monkeypatch.setitem(recipes(), "fp8", replace(recipes()["fp32"], compute="float8_e4m3fn"))
    assert "step: not bounded, because no peak of float8_e4m3fn products is known for a100" in estimate_as("fp8")
    (cell,) = json.loads(estimate_as("fp8", "--format", "json"))
    assert cell["step_time_s"] == {"reason": "no peak of float8_e4m3fn products is known for a100"}


@pytest.mark.usefixtures("in_this_process")
def test_a_plan_shows_predictions_when_asked_and_then_those_it_has(matrix, filled_cache):
    """Trace damaged predictions again."""
    ddp = plan_cells(load_matrix(Path(matrix), {}, [])).cells[0].cell_id
    for path in filled_cache.rglob("*.json"):
        path.write_text("{}")
    assert "no cell was predicted yet" in invoke("plan", matrix)
    asked = invoke("plan", matrix, "--estimate", "--only", "backend=ddp")
    assert "predicted peak" in asked
    later = invoke("plan", matrix)
    assert "predicted peak" in later
    values, again = (next(line.split()[-5:] for line in text.splitlines() if ddp in line) for text in (asked, later))
    assert values == again
    assert "--estimate predicts it" in next(line for line in later.splitlines() if "fsdp2" in line)
    assert "predicted peak" not in invoke("plan", matrix, "--no-estimate")
    assert sorted(path.read_text() == "{}" for path in filled_cache.rglob("*.json")) == [False, True]


def test_a_prediction_is_traced_once_and_is_the_same_from_the_cache(matrix, estimated, filled_cache):
    read = []
    loaded = load_matrix(Path(matrix), {}, [])
    cells = plan_cells(loaded).cells
    predict_cells(cells, [], loaded.measure.probed_step, notify=read.append)
    assert (invoke("estimate", matrix), read) == (estimated[1], [])
    assert len([*filled_cache.rglob("*.json")]) == len(cells) == 2


@pytest.mark.usefixtures("cache", "in_this_process")
def test_an_estimate_that_nobody_foresaw_to_fail_is_an_internal_error_after_all_cells_are_shown(tmp_path, monkeypatch):
    """In text and as JSON. One that is unsupported is a result, and a plan and a run go on in either case."""
    monkeypatch.chdir(tmp_path)
    paths = []
    for name, error in (("broken", "KeyError('no weights')"), ("refused", "UnsupportedError('not here')")):
        folder = tmp_path / "policies" / name
        folder.mkdir(parents=True)
        (folder / "presets.yaml").write_text("tiny: {}\n")
        source = f"from benchbox.errors import UnsupportedError\n\ndef build(preset, axes):\n    raise {error}\n"
        (folder / "policy.py").write_text(source)
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(MATRIX.replace("vitra", name))
    broken, refused = map(str, paths)
    for options in ((), ("--format", "json")):
        result = CliRunner().invoke(app, ["estimate", broken, *options])
        assert result.output.count("the estimate failed: KeyError: 'no weights'") == 2
        assert str(result.exception) == "2 of 2 predictions failed: the estimate failed: KeyError: 'no weights'"
        assert result.exception.exit_code == 1
    assert "the estimate failed" in invoke("plan", broken, "--estimate")
    assert invoke("estimate", refused).count("no prediction: not here") == 2


@pytest.mark.usefixtures("cache", "in_this_process")
def test_a_walk_is_estimated_at_its_first_batch_and_up_to_the_largest_that_fits(matrix):
    walk = ("estimate", matrix, "--only", "backend=ddp", "--set", "batch=null,axes.batch={search: max, start: 2, at_most: 64}")
    walk = (*walk, "--set", "measure={steps: 3, warmup_steps: 3, memory_limit: 20 MiB}")
    (first, *_), lines = json.loads(invoke(*walk, "--format", "json")), invoke(*walk).splitlines()
    largest = first["largest_batch"]["batch"]
    assert 2 < largest < 64
    assert lines[0] == f"{first['cell_id']}  backend=ddp batch=2 and up"
    assert " MiB at batch 2 in " in lines[1]
    assert lines[2] == f"  largest batch predicted to fit in 20.0 MiB: {largest}"
    unlimited = invoke(*walk, "--set", "measure.memory_limit=null", "--device", "cuda")
    assert "  largest batch not predicted: the memory of the device is unknown" in unlimited.splitlines()


def test_a_prediction_of_a_policy_that_ends_the_process_that_traces_it_is_a_reason(cache, tmp_path):
    policy = tmp_path / "policies" / "fatal"
    policy.mkdir(parents=True)
    (policy / "presets.yaml").write_text("tiny: {}\n")
    (policy / "policy.py").write_text("def build(preset, axes):\n    import os; os._exit(9)\n")
    cell = Cell(policy="fatal", size="tiny", backend="ddp", world_size=2, batch=1)
    ((_, reason),) = predict_cells([cell], [tmp_path / "policies"], 3).items()
    assert "the process that predicts was killed" in reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--link", "nvlink4"), "needs --accelerator and --link"),
        (("--device", "cpu", "--accelerator", "h200"), "--device cpu contradicts --accelerator h200, a GPU"),
        (("--link", "nvlink5", "--accelerator", "h100"), "unknown name 'nvlink5'"),
    ],
)
def test_a_time_without_known_hardware_is_refused_in_a_line(matrix, options, message):
    with pytest.raises(ConfigurationError, match=message):
        CliRunner().invoke(app, ("estimate", matrix, *options), catch_exceptions=False)


@pytest.mark.usefixtures("cache", "in_this_process")
def test_the_time_of_one_rank_needs_no_link_and_that_of_several_does(matrix):
    single = ("estimate", matrix, "--set", "world_size=1,axes.backend=[single]", "--accelerator", "h200")
    (cell,) = json.loads(invoke(*single, "--format", "json"))
    assert cell["step_time_s"]["lower"] == cell["step_time_s"]["upper"] > 0
    assert "one rank does not communicate" in invoke(*single)
    with pytest.raises(ConfigurationError, match="of several ranks needs --accelerator and --link"):
        CliRunner().invoke(app, ("estimate", matrix, "--accelerator", "h200"), catch_exceptions=False)


@pytest.mark.usefixtures("in_this_process")
def test_an_accelerator_is_a_gpu_whose_link_is_not_that_of_this_machines_cpu(matrix, cache, monkeypatch):
    """Without --device. Its tensors are allocated as a GPU's, and `doctor --links` may have measured gloo here."""
    asked = []
    monkeypatch.setattr("benchbox.cli.estimate.read_measured_link", asked.append)  # none
    single = ("estimate", matrix, "--set", "world_size=1,axes.backend=[single]", "--format", "json")
    (cell,) = json.loads(invoke(*single, "--accelerator", "h200"))
    assert asked == ["cuda"]
    ((on_cpu,), (on_gpu,)) = (json.loads(invoke(*single, "--device", device)) for device in ("cpu", "cuda"))
    assert cell["prediction"] == on_gpu["prediction"] != on_cpu["prediction"]
    assert sorted(path.suffixes[-2] for path in cache.rglob("*.json")) == [".cpu", ".cuda"]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("verb", [("estimate",), ("plan", "--estimate")])
def test_predictions_are_for_the_device_of_this_machine(matrix, cache, monkeypatch, verb):
    monkeypatch.setattr("benchbox.launch.process.environment.has_cuda_device", lambda _: True)
    first = invoke(*verb, matrix, "--only", "backend=ddp")
    (path,) = cache.rglob("*.json")
    assert path.suffixes[-2] == ".cuda"
    if "plan" in verb:
        assert "predicted peak" in first
        assert "predicted peak" in invoke("plan", matrix), "read from the cache"


@pytest.mark.usefixtures("cache", "in_this_process")
def test_skipped_cells_are_shown_with_the_reason(matrix):
    alone = ("estimate", matrix, "--set", "world_size=1")
    reason = "fsdp2 needs at least 2 ranks, and world_size is 1"
    assert f"  skipped: {reason}" in invoke(*alone).splitlines()
    cells = {entry["cell"]["backend"]: entry for entry in json.loads(invoke(*alone, "--format", "json"))}
    assert (cells["fsdp2"]["prediction"], cells["fsdp2"]["reason"]) == (None, f"skipped: {reason}")


def test_predictions_of_a_run_stand_beside_what_it_measured(tmp_path, monkeypatch):
    cells = [replace(CELL, policy="pi0", backend=backend) for backend in ("ddp", "zero2", "fsdp2")]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells))
    records = {cell: example_record(cell) for cell in cells}
    for cell in cells[:2]:
        store.write_record(records[cell])
    predictions = {cell.cell_id: prediction_of(record) for cell, record in records.items()}
    predictions[cells[0].cell_id]["peak_bytes"] //= 2

    outcomes = {}

    def write(folder, _):
        write_predictions(folder, predictions, {})
        return outcomes

    monkeypatch.setattr("benchbox.cli.predicting.predict_run", write)
    lines = invoke("estimate", str(tmp_path)).splitlines()
    assert lines[0] == "backend=ddp: peak memory refuted"
    assert lines[1].startswith("  predicted 80.00 MiB, measured 160.0 MiB, error -50.00%; 80.0 MiB more than predicted for ")
    assert "backend=zero2: communication confirmed" in lines
    unmeasured = lines[lines.index("backend=fsdp2: peak memory not measured") + 1]
    assert unmeasured == "  predicted 160.0 MiB, measured -; no launch ended ok with it"
    assert lines[-2:] == [
        "6 predictions: confirmed 3, not measured 2, refuted 1",
        f"{tmp_path / 'predictions.json'}; `benchbox report {tmp_path}` shows them",
    ]
    first, *_ = json.loads(invoke("estimate", str(tmp_path), "--format", "json"))
    assert (first["cell_id"], first["verdict"], first["error"]) == (cells[0].cell_id, "refuted", -0.5)
    for options in (("--only", "backend=ddp"), ("--device", "cuda"), ("--accelerator", "h100", "--link", "nvlink4")):
        with pytest.raises(
            ConfigurationError, match="is a run directory: --set, --only, --simulate, --device, --accelerator and --link "
        ):
            CliRunner().invoke(app, ("estimate", str(tmp_path), *options), catch_exceptions=False)
    outcomes |= {"a": "not supported"}
    assert "no prediction of 1 cell: not supported" in invoke("estimate", str(tmp_path)).splitlines()
    outcomes |= {"b": PredictionFailure("the estimate failed: KeyError: 1")}
    for options in ((), ("--format", "json")):
        failed = CliRunner().invoke(app, ("estimate", str(tmp_path), *options))
        assert str(failed.exception) == "1 of 2 predictions failed: the estimate failed: KeyError: 1"


@pytest.mark.parametrize(
    "verb", [("estimate",), ("profile", "--cell", CELL.cell_id), ("train", "--cell", CELL.cell_id, "--from")]
)
def test_a_run_whose_policy_was_named_by_a_path_needs_its_folder_again(tmp_path, verb):
    """The predictions that the run wrote are kept."""
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    store.write_record(example_record())
    written = write_predictions(tmp_path, {CELL.cell_id: prediction_of(example_record())}, {}).read_bytes()
    error = CliRunner().invoke(app, (*verb, str(tmp_path))).exception
    assert isinstance(error, ConfigurationError)
    assert str(error) == f"{tmp_path}: unknown policy 'example'; name its folder by --policy-dir"
    assert (tmp_path / "predictions.json").read_bytes() == written
