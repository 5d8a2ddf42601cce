from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.backends import backend_info
from benchbox.spec.cell import Cell
from benchbox.spec.train import TrainConfig, load_train

GOOD = "name: trial\npolicy: alpha\nsize: tiny\nbackend: ddp\nworld_size: 2\nbatch: 1\nsteps: 5\n"


@pytest.fixture
def load_training(tmp_path, policies):
    def load(text: str, overrides=None) -> TrainConfig:
        path = tmp_path / "t.yaml"
        path.write_text(text)
        return load_train(path, overrides, [policies])

    return load


def test_a_training_file_names_one_cell_and_survives_the_way_to_the_worker(load_training):
    config = load_training(GOOD + "freeze: freeze_vision\ncheckpoint: {every: 2}\n", {"batch": "3"})
    assert config.cell == Cell(policy="alpha", size="tiny", backend="ddp", world_size=2, batch=3, freeze="freeze_vision")
    assert (config.steps, config.checkpoint_every) == (5, 2)
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD + "log_evry: 2\n", "t.yaml:8:1: unknown key 'log_evry'; did you mean 'log_every'?"),
        (GOOD + "checkpoint: {evry: 2}\n", "t.yaml:8:14: unknown key 'evry'; did you mean 'every'?"),
        (
            GOOD + "data: {lerobot: nowhere}\n",
            "t.yaml:8:17: nowhere is not a LeRobot dataset: there is no such folder",
        ),
        (
            GOOD + "data: {tokenizer: nowhere}\n",
            "t.yaml:8:19: nowhere is not a tokenizer: there is no such file; name a tokenizer.json or its folder",
        ),
        (
            GOOD + "weights: nowhere\n",
            "t.yaml:8:10: weights: nowhere: there is no such file; name a safetensors file, or a folder of them",
        ),
        (GOOD + "axes: {}\n", "t.yaml:8:1: unknown key 'axes'"),
        (GOOD.replace("steps: 5\n", ""), "t.yaml:1:1: the file needs the key 'steps'"),
        (GOOD.replace("batch: 1\n", ""), "t.yaml:1:1: training needs batch"),
        (GOOD.replace("alpha\nsize: tiny", "beta\nsize: full"), "t.yaml:3:7: policy beta has no size 'full'; one of tiny"),
    ],
)
def test_what_is_wrong_with_it_is_said_where_it_stands(load_training, tmp_path, text, line):
    with pytest.raises(ConfigurationError) as caught:
        load_training(text)
    assert [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems] == [line]


def test_the_shipped_training_files_load():
    """Each names the shipped policies and data, and can be saved by its backend."""
    shipped = sorted((Path(__file__).parents[3] / "matrices" / "train").glob("*.yaml"))
    assert shipped
    for path in shipped:
        config = load_train(path)
        assert config.name == path.stem
        assert backend_info(config.cell.backend).saves
