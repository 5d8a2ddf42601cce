"""The folder of a job, which is emptied only where an earlier job has made it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchbox.errors import ConfigurationError
from benchbox.launch.job import Job
from benchbox.launch.profiling import profile_cell
from benchbox.launch.training import launch_training
from benchbox.spec.train import load_train
from tests.support.launchers import MEASURE, cell

TRAIN = """
name: small
policy: pi05
size: tiny
data: synthetic
backend: single
world_size: 1
batch: 1
recipe: fp32
steps: 2
"""


UNUSED = cast("Any", SimpleNamespace(nnodes=1, message=print))


def train_in(folder: Path, *, resume: bool = False) -> None:
    launch_training(
        load_train(folder / "train.yaml"),
        folder,
        resume=resume,
        launcher=UNUSED,
        max_restarts=0,
        progress=UNUSED,
        stop_signals=(),
    )


def _job(folder: Path) -> Job:
    return Job(config=cast("Any", {"kind": "look"}), ranks=1, folder=folder, timeout_s=None, hang_after_s=1.0)


def test_a_folder_that_no_job_has_made_is_refused_and_left(tmp_path: Path) -> None:
    launch = tmp_path / "launch" / "robot.launch.py"
    launch.parent.mkdir()
    launch.touch()
    for content in (None, {"jobs": []}):
        if content is not None:
            (launch.parent / "job.json").write_text(json.dumps(content))
        with pytest.raises(ConfigurationError, match=r"launch: exists, and is no folder of benchbox.*; name another .* --out"):
            _job(launch.parent).prepare()
        assert launch.exists()


def test_what_an_earlier_job_left_is_removed(tmp_path: Path) -> None:
    job = _job(tmp_path / "launch")
    job.prepare()
    first = json.loads(job.file.read_text())
    (job.folder / "torchrun" / "logs").mkdir(parents=True)
    job.events(0).touch()
    job.prepare()
    assert [path.name for path in job.folder.iterdir()] == ["job.json"]
    assert json.loads(job.file.read_text())["id"] != first["id"]


def test_a_profile_and_a_training_delete_nothing_beside_a_folder_of_others(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    names = ("launch/robot.launch.py", "ranks/army.csv", "trace-rank0.json", "metrics.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match="ranks: exists, and is no folder of benchbox"):
        profile_cell(cell("healthy"), MEASURE, profiled_steps=2, folder=tmp_path, launcher=UNUSED, stop=lambda: False)
    with pytest.raises(ConfigurationError, match="launch: exists, and is no folder of benchbox"):
        train_in(tmp_path)
    assert all((tmp_path / name).exists() for name in names)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "validation.jsonl", "findings.jsonl", "restarts.json", "data.json", "weights.json"]
)
def test_a_training_replaces_no_file_of_others(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / name).write_text("[1, 2]")
    with pytest.raises(ConfigurationError, match=rf"{name}: exists, and is not of a training in this folder.*; name another"):
        train_in(tmp_path, resume=resume)
    assert (tmp_path / name).read_text() == "[1, 2]"
