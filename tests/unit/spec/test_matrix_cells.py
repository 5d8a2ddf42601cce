from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from benchbox.errors import RecordError
from benchbox.spec import load_matrix
from benchbox.spec.cell import Cell, DataSpec, MeasureSpec, OptimSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.fields import Point
from benchbox.spec.optim import GroupSpec, SpikeSpec
from benchbox.spec.schema import MeasureFile, OptimFile
from benchbox.spec.threshold import Threshold
from benchbox.store.packed import read_packed
from tests.support.good_matrix import GOOD

ROOT = Path(__file__).parents[3]


def points(matrix, *names):
    return [tuple(getattr(cell, name) for name in names) for cell in matrix.cells()]


def test_axes_multiply_in_the_order_of_the_file(load):
    assert points(load(GOOD), "backend", "batch") == [("zero2", 1), ("zero2", 2), ("ddp", 1), ("ddp", 2)]


def test_the_keys_of_a_zipped_axis_move_together(load):
    matrix = load(
        GOOD.replace("[1, 2]", "[1]") + "  pair:\n    - {cams: 1, attention: eager}\n    - {cams: 4, attention: sdpa}\n"
    )
    assert points(matrix, "backend", "cams", "attention") == [
        ("zero2", 1, "eager"),
        ("zero2", 4, "sdpa"),
        ("ddp", 1, "eager"),
        ("ddp", 4, "sdpa"),
    ]


@pytest.mark.parametrize("name", ["copy", "json", "schema", "model_dump"])
def test_a_zipped_axis_may_have_any_name(load, name):
    assert points(load(GOOD.replace("batch: [1, 2]", f"{name}: [{{batch: 1}}, {{batch: 2}}]")), "batch") == [(1,), (2,)] * 2


def test_included_points_come_last_and_take_from_the_top_level_what_they_leave_out(load):
    matrix = load(GOOD + "include: [{backend: single, world_size: 1, batch: 8}]\n")
    assert list(matrix.cells())[-1] == Cell(policy="alpha", size="tiny", backend="single", world_size=1, batch=8)


def test_without_axes_the_included_points_are_the_matrix(load):
    text = (
        "name: n\npolicy: alpha\nsize: tiny\nworld_size: 2\ninclude: [{backend: ddp, batch: 1}, {backend: zero1, batch: 2}]\n"
    )
    assert points(load(text), "backend", "batch") == [("ddp", 1), ("zero1", 2)]


def test_without_axes_and_points_the_top_level_is_the_one_cell(load):
    assert points(load("name: n\npolicy: alpha\nsize: tiny\nworld_size: 2\nbackend: ddp\nbatch: 3\n"), "batch") == [(3,)]


def test_excluded_points_are_left_out_where_every_key_agrees(load):
    matrix = load(GOOD + "exclude: [{backend: ddp, batch: 2}, {batch: 2}]\n")
    assert len(list(matrix.cells())) == 2
    matrix = load(GOOD + "exclude: [{backend: ddp, batch: 2}]\n")
    assert points(matrix, "backend", "batch") == [("zero2", 1), ("zero2", 2), ("ddp", 1)]


def test_what_is_excluded_may_have_been_left_out_on_the_command_line(load):
    matrix = load(GOOD + "exclude: [{backend: ddp, batch: 2}]\n", {"axes.batch": "[1]"})
    assert points(matrix, "batch") == [(1,)] * 2


def test_an_included_point_is_not_excluded(load):
    matrix = load(GOOD + "exclude: [{batch: 2}]\ninclude: [{backend: zero3, batch: 2}]\n")
    assert points(matrix, "backend", "batch") == [("zero2", 1), ("ddp", 1), ("zero3", 2)]


def test_every_field_of_a_cell_but_data_and_optim_can_be_an_axis(load, tmp_path):
    save_file({}, tmp_path / "w.safetensors")
    values = {
        "policy": ["alpha", "beta"],
        "size": ["tiny"],
        "backend": ["ddp", "zero1"],
        "world_size": [2, 4],
        "batch": [1],
        "cams": [1, 2],
        "attention": ["eager", "sdpa"],
        "checkpointing": ["false", "true"],
        "compile": ["off", "blocks"],
        "padding": ["full", "longest"],
        "recipe": ["fp32", "bf16_pure"],
        "freeze": ["full", "freeze_vision"],
        "weights": [tmp_path, tmp_path / "w.safetensors"],
        "shard_size": [3],
        "accumulation": [1, 2],
        "seed": [0, 1],
        "order": ["frame_shuffle", "episode_shuffle"],
    }
    assert set(values) == {field.name for field in fields(Cell)} - {"data", "optim"} == set(Point.model_fields)
    axes = "".join(f"  {name}: [{', '.join(map(str, options))}]\n" for name, options in values.items())
    cells = list(load("name: n\naxes:\n" + axes).cells())
    assert len({cell.cell_id for cell in cells}) == len(cells) == 2**14


def test_aliases_stand_for_what_they_name(load):
    matrix = load(GOOD.replace("[1, 2]", "&few [1, 2]") + "  cams: *few\n")
    assert len(list(matrix.cells())) == 8


def test_the_rest_of_the_file_reaches_the_matrix(load, tmp_path, monkeypatch):
    (tmp_path / "somewhere/meta").mkdir(parents=True)
    (tmp_path / "somewhere/meta/info.json").touch()
    monkeypatch.chdir(tmp_path)
    matrix = load(
        GOOD
        + "seed: 3\ndata: {lerobot: somewhere, workers: 2}\noptim: {lr: 1e-3, betas: [0.9, 0.999], head_lr: 0.01}\n"
        + "measure: {steps: 4, timeout_s: 30}\nreference: {backend: ddp}\n"
        + "thresholds:\n  - {metric: step_time_s, where: {batch: 2}, vs: baseline, max_regression: 5%}\n"
        + "  - {metric: mfu, min: 0.4}\n"
    )
    (cell, *_) = matrix.cells()
    assert cell.seed == 3
    assert cell.data == DataSpec(kind="lerobot", path="somewhere", workers=2)
    assert cell.optim == OptimSpec(lr=1e-3, betas=(0.9, 0.999), head_lr=0.01)
    assert matrix.measure == MeasureSpec(steps=4, timeout_s=30.0)
    assert matrix.reference == {"backend": "ddp"}
    regression, minimum = matrix.thresholds
    assert regression == Threshold(metric="step_time_s", where={"batch": 2}, max_regression=0.05)
    assert minimum == Threshold(metric="mfu", min=0.4)
    assert all(Threshold(**threshold.to_dict()) == threshold for threshold in matrix.thresholds)


@pytest.mark.parametrize(("text", "fraction"), [("500%", 5.0), ("100%", 1.0), ("0.999", 0.999), ("0", 0.0)])
def test_a_regression_of_100_percent_or_more_is_written_with_its_sign(load, text, fraction):
    matrix = load(GOOD + f"thresholds:\n  - {{metric: step_time_s, vs: baseline, max_regression: {text}}}\n")
    assert matrix.thresholds[0].max_regression == fraction


@pytest.mark.parametrize("overrides", [{}, {"axes.batch": "[1]"}, {"axes.batch": "null", "batch": "1"}])
def test_a_threshold_on_the_fastest_batch_of_walks_may_stay_where_set_replaces_the_search(load, overrides):
    searched = GOOD.replace("[1, 2]", "{search: max}")
    demand = "thresholds: [{metric: global_samples_per_s, where: {backend: ddp, batch: fastest}, min: 1}]\n"
    (threshold,) = load(searched + demand, overrides).thresholds
    assert threshold == Threshold(metric="global_samples_per_s", where={"backend": "ddp", "batch": "fastest"}, min=1)


def test_a_file_that_says_nothing_gets_the_defaults_of_the_dataclasses(load):
    matrix = load(GOOD)
    assert (matrix.data, matrix.optim, matrix.measure) == (DataSpec(), OptimSpec(), MeasureSpec())


def test_a_mapping_of_data_that_names_no_dataset_means_the_shipped_one(load, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.touch()
    matrix = load(GOOD + f"data: {{tokenizer: '{file}', workers: 0, block: 32, buffer: 64}}\n")
    assert matrix.data == DataSpec(kind="sample", workers=0, tokenizer=str(file), block=32, buffer=64)
    assert matrix.data.tokenizer_file == file
    assert load(GOOD + f"data: {{tokenizer: '{tmp_path}'}}\n").data.tokenizer_file == file
    assert load(GOOD + "data: {tokenizer: bytes}\n").data == DataSpec()
    assert DataSpec().tokenizer_file is None


def test_what_reads_the_text_is_said_in_a_line():
    assert DataSpec().reading.startswith("text: every byte is a token")
    assert DataSpec(tokenizer="some/where").reading == "text: tokens of some/where"
    assert DataSpec(kind="synthetic").reading == "text: random tokens"


def test_another_tokenizer_makes_another_cell(load, tmp_path):
    (tmp_path / "tokenizer.json").touch()
    (cell, *_) = load(GOOD).cells()
    (tokenized, *_) = load(GOOD + f"data: {{tokenizer: '{tmp_path}'}}\n").cells()
    assert cell.cell_id != tokenized.cell_id
    assert Cell.from_dict(tokenized.to_dict()) == tokenized
    assert cell.to_dict()["data"]["tokenizer"] == "bytes"  # records say so
    older = cell.to_dict()
    del older["data"]["tokenizer"]
    assert Cell.from_dict(older).cell_id == cell.cell_id


def test_published_weights_make_another_cell_and_without_them_a_cell_keeps_the_id_it_had(load, tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    (cell, *_) = load(GOOD).cells()
    (pretrained, *_) = load(GOOD + f"weights: {tmp_path}\n").cells()
    assert (cell.weights, pretrained.weights) == (None, str(tmp_path))
    assert cell.cell_id != pretrained.cell_id
    assert Cell.from_dict(pretrained.to_dict()) == pretrained
    older = cell.to_dict()
    del older["weights"]
    assert Cell.from_dict(older).cell_id == cell.cell_id


def test_a_measurement_of_another_version_has_its_known_keys():
    written = dataclasses.asdict(MeasureSpec(steps=4)) | {"added_later": 1}
    del written["hang_after_s"]
    assert MeasureSpec.from_dict(written) == MeasureSpec(steps=4)


@pytest.mark.parametrize(("file", "spec"), [(OptimFile, OptimSpec), (MeasureFile, MeasureSpec)])
def test_the_file_names_every_setting_there_is(file, spec):
    assert list(file.model_fields) == [field.name for field in fields(spec)]


def test_a_cell_is_named_by_what_it_holds_and_not_by_its_file(load):
    (cell, *_) = load(GOOD).cells()
    (renamed, *_) = load(GOOD.replace("trial", "other") + "measure: {steps: 3}\n").cells()
    assert cell.cell_id == renamed.cell_id
    assert Cell.from_dict(cell.to_dict()) == cell
    changes = [{"batch": 9}, {"optim": OptimSpec(lr=1.0)}, {"data": DataSpec(kind="synthetic")}]
    changed = {dataclasses.replace(cell, **change).cell_id for change in changes}
    assert len(changed | {cell.cell_id}) == 4


@pytest.mark.parametrize(
    "keys", [(), ("data",), ("optim",), ("optim", "spike"), ("optim", "groups", 0), ("data", "datasets", 0)]
)
def test_a_cell_with_a_field_of_a_newer_benchbox_is_refused_in_one_line(load, keys):
    """Without the field it would be another cell, and `verify` and `train --from` would take it for that one."""
    optim = OptimSpec(spike=SpikeSpec(), groups=(GroupSpec(match="*"),))
    cell = dataclasses.replace(next(iter(load(GOOD).cells())), data=DataSpec(datasets=(DatasetSpec(path="arm"),)), optim=optim)
    values = cell.to_dict()
    assert Cell.from_dict(copy.deepcopy(values)) == cell
    functools.reduce(operator.getitem, keys, values)["added_later"] = None
    message = "a cell has the field 'added_later', which this benchbox does not know: written by a newer benchbox"
    with pytest.raises(RecordError, match=message):
        Cell.from_dict(values)


def test_a_cell_that_freezes_nothing_keeps_the_id_it_was_published_under():
    """Published records and baselines are from before cells could freeze; what freezes is another cell."""
    published = [record for path in (ROOT / "reports").glob("**/records.parquet") for record in read_packed(path)]
    assert published
    for record in published:
        cell = Cell.from_dict(record["cell"])
        assert cell.cell_id == record["cell_id"]
        assert dataclasses.replace(cell, freeze="freeze_vision").cell_id != cell.cell_id


def test_the_shipped_matrices_load():
    matrices = {path.stem: load_matrix(path) for path in (ROOT / "matrices").glob("*.yaml")}
    assert {"fsdp_vs_zero2", "backends"} <= set(matrices)
    assert all(matrix.name == stem for stem, matrix in matrices.items())
    assert {cell.samples_per_step for cell in matrices["backends"].cells()} == {4}, "their losses are drawn over one another"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1.5 GB", 1_500_000_000), ("2000KB", 2_000_000), ("512 MiB", 2**29), ("3TiB", 3 * 2**40), ("1048576", 2**20)],
)
def test_units_of_memory_are_decimal_without_an_i(load, text, size):
    assert load(GOOD + f"measure: {{memory_limit: {text}, warmup_steps: 3}}\n").measure.memory_limit == size
