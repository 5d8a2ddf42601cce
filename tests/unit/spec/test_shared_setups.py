"""A training file is a matrix of its cell, and a measured cell is the set-up of a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.data.sample import sample_path
from benchbox.errors import ConfigurationError
from benchbox.spec.cell import Cell, DataSpec, OptimSpec
from benchbox.spec.load import load_matrix
from benchbox.spec.measured_setup import MeasuredSetup, differences
from benchbox.spec.optim import GroupSpec, SpikeSpec
from benchbox.spec.train import load_train

TRAINING = """\
name: trial
policy: alpha
size: tiny
backend: ddp
world_size: 2
batch: 4
optim: {lr: 0.001}
steps: 5
checkpoint: {every: 2}
audit: {every: 3}
"""
REST = "name: rest\nsteps: 7\ncheckpoint: {every: 0}\n"
MEASURED = Cell(
    policy="alpha",
    size="tiny",
    backend="zero2",
    world_size=2,
    batch=8,
    attention="eager",
    data=DataSpec(kind="synthetic", workers=0),
    optim=OptimSpec(lr=3e-4, betas=(0.9, 0.99)),
)


@pytest.fixture
def write(tmp_path):
    def write_file(text: str):
        path = tmp_path / "t.yaml"
        path.write_text(text)
        return path

    return write_file


def from_measured(path, policies, overrides=None):
    return load_train(path, overrides, [policies], measured=MeasuredSetup(cell=MEASURED, label="cell 12ab of runs/r"))


def test_a_training_file_is_a_matrix_of_the_cell_that_it_trains(write, policies):
    path = write(TRAINING)
    assert list(load_matrix(path, None, [policies]).cells()) == [load_train(path, None, [policies]).cell]


def test_an_axis_on_the_command_line_varies_a_field_of_a_training_file(write, policies):
    matrix = load_matrix(write(TRAINING), {"axes.batch": "[1, 2]", "measure.steps": "3"}, [policies])
    assert [cell.batch for cell in matrix.cells()] == [1, 2]
    assert matrix.measure.steps == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TRAINING.replace("{every: 2}", "{evry: 2}"), "t.yaml:9:14: unknown key 'evry'; did you mean 'every'?"),
        (TRAINING + "axes: {backend: [ddp]}\n", "t.yaml:8:1: unknown key 'steps'; it belongs to measure: write measure.steps"),
    ],
)
def test_its_training_keys_are_checked_and_a_matrix_has_none(write, policies, tmp_path, text, line):
    with pytest.raises(ConfigurationError) as caught:
        load_matrix(write(text), None, [policies])
    assert line in [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_a_training_takes_the_set_up_of_a_measured_cell(write, policies):
    config = from_measured(write(REST), policies)
    assert config.cell == MEASURED
    assert (config.steps, config.checkpoint.every) == (7, 0)
    assert differences(config.cell, MEASURED) == []


def test_a_training_without_a_file_needs_only_its_steps(policies):
    config = from_measured(None, policies, {"steps": "9"})
    assert (config.cell, config.steps, config.name) == (MEASURED, 9, f"alpha-{MEASURED.cell_id}")
    with pytest.raises(ConfigurationError, match="the file needs the key 'steps'"):
        from_measured(None, policies)


def test_keys_of_optim_and_data_may_differ_and_are_listed(write, policies):
    """The other keys of `optim` are as measured."""
    config = from_measured(write(REST + "optim: {lr: 0.002}\ndata: sample\n"), policies, {"batch": "16"})
    assert config.cell.optim == OptimSpec(lr=0.002, betas=(0.9, 0.99))
    assert differences(config.cell, MEASURED) == [
        "batch is 16, measured with 8",
        "data.kind is sample, measured with synthetic",
        "data.workers is 1, measured with 0",
        "optim.lr is 0.002, measured with 0.0003",
    ]


def test_a_file_with_another_set_up_is_refused_where_it_says_so(write, policies, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        from_measured(write(REST + "batch: 4\nbackend: zero2\n"), policies)
    (problem,) = caught.value.problems
    assert str(problem).replace(f"{tmp_path}/", "") == (
        "t.yaml:4:8: batch is 4 here and 8 in cell 12ab of runs/r; remove it, or change the measured set-up on purpose with "
        "--set batch=..."
    )


def test_a_field_that_the_measured_cell_leaves_out_is_a_part_of_its_set_up(write, policies, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        from_measured(write(REST + "shard_size: 2\n"), policies)
    assert "t.yaml:4:13: shard_size is 2 here and null in cell 12ab of runs/r" in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"spike": SpikeSpec()},
        {"spike": SpikeSpec(max=3.0)},
        {"groups": (GroupSpec(match="*", lr=1e-5, betas=(0.9, 0.98)), GroupSpec(match="*.bias", weight_decay=0.0))},
    ],
)
def test_a_training_takes_the_optimizer_of_a_measured_cell_whatever_it_has(policies, options):
    cell = replace(MEASURED, optim=replace(MEASURED.optim, **options))
    config = load_train(None, {"steps": "3"}, [policies], measured=MeasuredSetup(cell=cell, label="cell 12ab of runs/r"))
    assert config.cell == cell


def test_a_part_of_the_measured_data_is_not_changed_into_one_of_the_default_dataset(write, policies):
    with pytest.raises(ConfigurationError) as refused:
        from_measured(None, policies, {"steps": "3", "data.workers": "2"})
    assert str(refused.value).startswith(
        "--set data.workers: the data of cell 12ab of runs/r are taken as a whole, and this is a part"
    )
    dataset = str(sample_path())
    whole = from_measured(None, policies, {"steps": "3", "data.lerobot": dataset, "data.workers": "2"})
    assert (whole.cell.data.path, whole.cell.data.workers) == (dataset, 2)
    file = from_measured(write(REST + "data: {validation: 0.2}\n"), policies, {"data.workers": "2"})
    assert (file.cell.data.validation, file.cell.data.workers) == (0.2, 2)
