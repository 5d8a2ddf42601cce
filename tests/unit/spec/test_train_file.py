from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchbox.errors import ConfigurationError
from benchbox.registry.backends import backend_info
from benchbox.registry.trackers import TRACKERS, TrackerInfo
from benchbox.spec.cell import Cell
from benchbox.spec.train import TrainConfig, load_train, schedule_note

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
    assert (config.steps, config.checkpoint.every) == (5, 2)
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("overrides", [{}, {"steps": "5"}])
def test_a_matrix_is_said_to_be_one_in_one_line_with_the_command_that_measures_it(load_training, overrides, tmp_path):
    matrix = "name: trial\npolicy: alpha\nsize: tiny\nmeasure: {steps: 3}\naxes: {backend: [ddp, fsdp2], batch: [1, 2]}\n"
    with pytest.raises(ConfigurationError) as caught:
        load_training(matrix, overrides)
    file = tmp_path / "t.yaml"
    message = "a matrix, as it has measure and no steps, and not a training file"
    assert str(caught.value) == f"{file}:4:1: {message}; measure it with benchbox run {file}"


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
        (
            GOOD + "validation: {every: 5}\n",
            "t.yaml:8:21: the data have no validation episodes; write data: {validation: 0.1}, or leave out validation.every",
        ),
        (
            GOOD + "data: synthetic\nvalidation: {every: 5}\n",
            "t.yaml:9:21: the data have no validation episodes; write data: {validation: 0.1}, or leave out validation.every",
        ),
        (GOOD + "seed: 2020-01-01\n", "t.yaml:8:7: '2020-01-01' reads as a timestamp; put it in quotes"),
        (
            GOOD + "attention: flex\npadding: longest\n",
            (
                "t.yaml:9:10: FlexAttention is compiled for every length of a batch, unseen: "
                "write padding: full, or attention: sdpa"
            ),
        ),
        (GOOD + "validation: {evry: 5}\n", "t.yaml:8:14: unknown key 'evry'; did you mean 'every'?"),
        (
            GOOD + "checkpoint: {keep_best: {count: 1}}\n",
            "t.yaml:8:25: keep_best needs a validation that scores checkpoints; add validation, or remove it",
        ),
        (
            GOOD + "checkpoint: {every: 4, keep_best: {count: 1}}\nvalidation: {every: 3}\n",
            (
                "t.yaml:8:35: keep_best needs a validation at every checkpoint, and 4 is no multiple of 3; "
                "make checkpoint.every a multiple of validation.every"
            ),
        ),
        (
            GOOD + "checkpoint: {every: 0, keep_best: {count: 1}}\nvalidation: {every: 3}\n",
            "t.yaml:8:35: keep_best chooses among checkpoints, and checkpoint.every is 0; save some, or remove it",
        ),
        (
            GOOD + "data: {validation: 0.5}\nvalidation: {every: 3, weights: averages}\n",
            "t.yaml:9:33: there are no averages of the weights; set optim.ema_decay, or leave out validation.weights",
        ),
        (
            GOOD + "audit: {every: 2}\n",
            "t.yaml:8:16: audit.every is 2, and an audit observes 3 steps; every: 3 or more, 0 for none",
        ),
        (GOOD + "audit: {stop_on: eror}\n", "t.yaml:8:18: unknown stop_on \"eror\"; did you mean 'error'?"),
        (GOOD + "trackers: [tensorbord]\n", "t.yaml:8:12: unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        (GOOD.replace("ddp", "single"), "t.yaml:4:10: single runs on at most 1 rank, and world_size is 2"),
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


def test_validation_is_off_unless_it_is_asked_for_and_reaches_the_worker(load_training):
    assert load_training(GOOD + "data: {validation: 0.2}\n").validation.every == 0
    text = "data: {validation: 0.2}\nvalidation: {every: 5, at_start: true, max_samples: 30}\n"
    config = load_training(GOOD + text, {"validation.batch": "8"})
    section = config.validation
    assert (section.every, section.at_start, section.batch, section.max_samples) == (5, True, 8, 30)
    assert TrainConfig.from_dict(config.to_dict()) == config
    older = {key: value for key, value in config.to_dict().items() if key != "validation"}
    assert TrainConfig.from_dict(older).validation.every == 0


def test_settings_of_a_validation_that_never_takes_place_are_refused(load_training):
    with pytest.raises(ConfigurationError, match=r"t.yaml:\d+:1: nothing is validated without every; give validation.every, "):
        load_training(GOOD + "data: {validation: 0.2}\nvalidation: {at_start: true}\n")
    switched_off = GOOD + "data: {validation: 0.2}\nvalidation: {every: 5, at_start: true}\n"
    assert load_training(switched_off, {"validation.every": "0"}).validation.every == 0


def test_a_tracker_that_is_not_installed_is_named_with_its_remedy(load_training, monkeypatch):
    """A package that exists nowhere stands for one that is not installed here."""
    monkeypatch.setitem(TRACKERS, "absent", TrackerInfo("absent", "no_such_package", "nowhere:open"))
    with pytest.raises(ConfigurationError) as caught:
        load_training(GOOD + "trackers:\n  - absent\n")
    (problem,) = caught.value.problems
    assert str(problem).endswith("t.yaml:9:5: tracker absent is not installed; pip install 'benchbox[track]'")


def test_the_shipped_training_files_load():
    """Each names the shipped policies, data and backends."""
    shipped = sorted((Path(__file__).parents[3] / "matrices" / "train").glob("*.yaml"))
    assert shipped
    for path in shipped:
        config = load_train(path)
        assert config.name == path.stem
        assert backend_info(config.cell.backend)


@pytest.mark.parametrize(
    ("optim", "problem"),
    [
        ("{groups: [{match: head.*}]}", "8:18: the group 'head.*' sets nothing; give lr, weight_decay or betas"),
        ("{decay_steps: 5}", "8:8: decay_steps belong to schedule: wsd, and the schedule is warmup_cosine"),
        (
            "{schedule: wsd, warmup_steps: 50, total_steps: 60, decay_steps: 20}",
            "8:8: warmup_steps 50 reach into the decay from step 40 of 60; shorten warmup_steps or decay_steps",
        ),
        (
            "{schedule: wsd, warmup_steps: 0, total_steps: 60, decay_steps: 61}",
            "8:8: decay_steps 61 are more than total_steps 60; shorten decay_steps",
        ),
        (
            "{lr: 1.0e-5, final_lr: 1.0e-4}",
            "8:8: final_lr 0.0001 is above lr 1e-05, and a decay does not raise it; lower final_lr",
        ),
        ("{thaw_warmup_steps: 5}", "8:8: thaw_warmup_steps needs freeze_backbone_steps: nothing is frozen"),
        ("{ema_warmup: true}", "8:8: ema_warmup needs ema_decay: there is no average"),
        ("{ema_decay: 1.0}", "8:20: optim.ema_decay must be less than 1.0, not 1.0"),
        ("{spike: {max: 5.0, factor: 3.0}}", "8:16: max and factor exclude one another; give one of the two bounds"),
        ("{spike: {action: ignore}}", '8:25: unknown action "ignore"; one of skip, stop'),
    ],
)
def test_an_optimisation_without_effect_is_refused_where_it_stands(load_training, tmp_path, optim, problem):
    with pytest.raises(ConfigurationError) as caught:
        load_training(GOOD + f"optim: {optim}\n")
    assert [str(line).replace(f"{tmp_path}/t.yaml:", "") for line in caught.value.problems] == [problem]


def test_an_optimisation_survives_the_way_to_the_worker(load_training):
    optim = "{groups: [{match: h.*, betas: [0.5, 0.9]}, {match: b.*, lr: 0.5}], spike: {factor: 3.0}, ema_decay: 0.9}"
    config = load_training(GOOD + f"optim: {optim}\n")
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.cell.optim.groups[0].betas == (0.5, 0.9)
    assert config.cell.cell_id != load_training(GOOD).cell.cell_id


def test_a_training_that_ends_in_its_warm_up_says_what_share_of_the_rate_it_reaches(load_training):
    note = schedule_note(load_training(GOOD))
    assert schedule_note(load_training(GOOD + "optim: {warmup_steps: 5}\n")), "it would reach it in the step after the last"
    assert note == (
        "the training ends in the warm-up: steps is 5 and optim.warmup_steps is 1000, so the highest learning rate is 0.5% of "
        "optim.lr; lower optim.warmup_steps, or write optim.schedule: constant"
    )


def test_a_schedule_that_ends_in_its_warm_up_says_so_too(load_training):
    note = schedule_note(load_training(GOOD + "optim: {warmup_steps: 4, total_steps: 3}\n"))
    assert note.startswith(
        "the schedule ends in the warm-up: optim.total_steps is 3 and optim.warmup_steps is 4, so the highest learning rate is "
        "60.0% of optim.lr; "
    )


@pytest.mark.parametrize("optim", ["{warmup_steps: 4}", "{schedule: constant}", "{schedule: warmup_constant, warmup_steps: 0}"])
def test_a_training_that_reaches_its_rate_says_nothing_of_the_warm_up(load_training, optim):
    assert schedule_note(load_training(GOOD + f"optim: {optim}\n")) is None
