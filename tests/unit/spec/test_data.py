"""The key `data` of matrices and training files: datasets, and what is said about each."""

import json
from pathlib import Path

import pytest

from benchbox.errors import ConfigurationError
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.train import load_train
from tests.support.good_matrix import GOOD

MIXTURE = """data:
  validation: 0.1
  workers: 2
  mixture:
    - {lerobot: arm, weight: 2, rename: {cam_top: top}, control_mode: joint}
    - {lerobot: hand, weight: 1.5, source: bridge, keep: ranges.json}
"""


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """Descriptions of two datasets in the working directory."""
    monkeypatch.chdir(tmp_path)
    cameras = {"arm": ("cam_top", "wrist"), "hand": ("top", "side")}
    for name, names in cameras.items():
        (tmp_path / name / "meta").mkdir(parents=True)
        features = {f"observation.images.{camera}": {"dtype": "video"} for camera in names}
        features["action"] = {"dtype": "float32"}
        (tmp_path / name / "meta/info.json").write_text(json.dumps({"features": features}))
    (tmp_path / "ranges.json").write_text("{}")
    return tmp_path


def test_a_mixture_is_read_with_what_is_said_about_each_dataset(load, datasets):
    data = load(GOOD + MIXTURE).data
    arm = DatasetSpec(path="arm", weight=2, rename=(("cam_top", "top"),), control_mode="joint")
    hand = DatasetSpec(path="hand", weight=1.5, source="bridge", keep="ranges.json")
    assert data == DataSpec(kind="lerobot", workers=2, validation=0.1, datasets=(arm, hand))
    assert data.lerobot_datasets == (arm, hand)
    assert data.label == "arm, hand"
    assert [dataset.source_name for dataset in (arm, hand)] == ["arm", "bridge"]


def test_a_single_dataset_takes_the_same_keys(load, datasets):
    keys = "rename: {cam_top: top}, control_mode: ee, source: bridge, keep: ranges.json, validation: 0.2"
    data = load(GOOD + f"data: {{lerobot: arm, {keys}}}\n").data
    (dataset,) = data.lerobot_datasets
    assert dataset == DatasetSpec(
        path="arm", rename=(("cam_top", "top"),), control_mode="ee", source="bridge", keep="ranges.json"
    )
    assert (data.path, data.validation) == ("arm", 0.2)


def test_a_camera_called_policy_names_no_policy(load, datasets):
    info = datasets / "arm/meta/info.json"
    info.write_text(info.read_text().replace("cam_top", "policy"))
    data = load(GOOD + "data: {lerobot: arm, rename: {policy: front}}\n").data
    assert data.lerobot_datasets[0].rename == (("policy", "front"),)


def test_a_mixture_survives_json_and_is_part_of_the_id(load, datasets):
    (cell, *_) = load(GOOD + MIXTURE).cells()
    again = Cell.from_dict(json.loads(json.dumps(cell.to_dict())))
    assert again == cell
    assert again.cell_id == cell.cell_id
    edits = [("weight: 2", "weight: 3"), ("cam_top: top", "cam_top: roof"), ("0.1", "0.2"), ("bridge", "fractal")]
    edited = {next(iter(load(GOOD + MIXTURE.replace(*edit)).cells())).cell_id for edit in edits}
    assert len(edited | {cell.cell_id}) == 5


def test_a_dataset_alone_has_the_id_that_it_had_before_mixtures(load, datasets):
    """The last commit before mixtures gave this id to this cell."""
    ids = [cell.cell_id for cell in load(GOOD + "data: {lerobot: arm}\n").cells()]
    assert ids == [cell.cell_id for cell in load(GOOD + "data: {mixture: [{lerobot: arm}]}\n").cells()]
    assert ids[0] == "676d89aaa09a"
    (cell, *_) = load(GOOD + "data: {lerobot: arm}\n").cells()
    older = cell.to_dict()
    del older["data"]["datasets"], older["data"]["validation"]
    assert Cell.from_dict(older) == cell


WRONG = [
    (
        "data: {mixture: [{lerobot: lerobot/svla_so101}, {lerobot: ./svla_so101}]}",
        [
            (
                "8:28: lerobot/svla_so101 is not a LeRobot dataset: there is no such folder; "
                "datasets are read from local folders and not downloaded; name the folder of a copy"
            ),
            "8:59: ./svla_so101 is not a LeRobot dataset: there is no such folder",
        ],
    ),
    (
        "data: {mixture: [{lerobot: nowhere}, {lerobot: arm}, {lerobot: there}]}",
        [
            "8:28: nowhere is not a LeRobot dataset: there is no such folder",
            "8:64: there is not a LeRobot dataset: there is no such",
        ],
    ),
    (
        "data: {mixture: [{lerobot: arm, weight: 0}, {lerobot: hand, weight: -1}]}",
        [
            "8:41: data.mixture[0].weight must be more than 0.0, not 0",
            "8:69: data.mixture[1].weight must be more than 0.0, not -1",
        ],
    ),
    (
        "data: {mixture: [{lerobot: arm, weight: 1}, {lerobot: hand}, {lerobot: arm}]}",
        [
            "8:45: data.mixture[1] has no weight, and data.mixture[0] has one; give all datasets a weight, or none",
            "8:62: data.mixture[2] has no weight, and data.mixture[0] has one",
        ],
    ),
    (
        "data: {mixture: [{lerobot: arm, rename: {top: left}}, {lerobot: hand, rename: {sid: a, side: top}}]}",
        [
            "8:42: arm has no camera 'top'; did you mean 'cam_top'?",
            "8:80: hand has no camera 'sid'; did you mean 'side'?",
            "8:94: hand has two cameras with the name 'top': side, top; give each a name of its own",
        ],
    ),
    (
        "data: {mixture: [{lerobot: arm, keep: no.json}, {lerobot: hand, keep: none.parquet}]}",
        ["8:39: there is no file no.json; name a JSON or Parquet file", "8:71: there is no file none.parquet"],
    ),
    ("data: {validation: 1}", ["8:20: data.validation must be less than 1.0, not 1"]),
    ("data: {lerobot: arm, validation: -0.5}", ["8:34: data.validation must be at least 0.0, not -0.5"]),
    ("data: {lerobot: arm, mixture: [{lerobot: hand}]}", ["8:8: data has a mixture, and a dataset beside it"]),
    ("data: {mixture: [{lerobot: arm}], keep: ranges.json}", ["8:35: keep is of one dataset, and data has a mixture; give it"]),
    ("data: {source: x, control_mode: y}", ["8:8: source is of a dataset, and data names none", "8:19: control_mode is of a"]),
    ("data: {mixture: []}", ["8:17: data.mixture is empty"]),
    ("data: {mixture: [{weight: 1}]}", ["8:18: data.mixture[0] needs the key 'lerobot'"]),
    ("data: {mixture: [{lerobot: arm, wieght: 1}]}", ["8:33: unknown key 'wieght'; did you mean 'weight'?"]),
    (
        "data: {mixture: [{lerobot: arm, weight: 0}, {lerobot: nowhere, weight: 1}], tokenizer: nowhere}",
        [
            "8:41: data.mixture[0].weight must be more than 0",
            "8:55: nowhere is not a LeRobot dataset",
            "8:88: nowhere is not a tokenizer",
        ],
    ),
]


@pytest.mark.parametrize(("text", "lines"), WRONG, ids=[text[:60] for text, _ in WRONG])
def test_every_wrong_entry_is_reported_where_it_stands(refused, datasets, text, lines):
    reported = refused(GOOD + text + "\n")
    assert [line.startswith(f"m.yaml:{start}") for line, start in zip(reported, lines, strict=True)] == [True] * len(lines), (
        reported
    )


def test_a_training_file_takes_a_mixture_and_reports_all_that_is_wrong_with_it(datasets, policies):
    file = datasets / "t.yaml"
    text = "name: t\npolicy: alpha\nsize: tiny\nbackend: single\nworld_size: 1\nbatch: 1\nsteps: 2\n"
    file.write_text(text + MIXTURE)
    assert [dataset.path for dataset in load_train(file, {}, [policies]).cell.data.datasets] == ["arm", "hand"]
    file.write_text(
        text.replace("steps: 2", "steps: 0") + MIXTURE.replace("arm,", "nowhere,").replace("ranges.json", "no.json")
    )
    with pytest.raises(ConfigurationError) as caught:
        load_train(file, {}, [policies])
    lines = [str(problem).removeprefix(f"{file}:") for problem in caught.value.problems]
    assert [line.split(":")[0] for line in lines] == ["7", "12", "13"]


@pytest.mark.parametrize("name", ["demos", "demos/", "demos.recording"])
def test_an_unfinished_recording_is_refused_with_the_command_that_says_how_to_finish_it(load, datasets, name):
    Path("demos.recording").mkdir()
    Path("demos.recording/arguments.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=f"its recording is not finished: benchbox data inspect {name} says how to"):
        load(GOOD + f"data: {{lerobot: {name}}}\n")
