"""The data that a checkpoint is validated on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.data.loading.loader import open_samples
from benchbox.data.sample import sample_path
from benchbox.data.samples.digest import digest_datasets
from benchbox.errors import ConfigurationError, DataError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.session import build_session
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.train import CheckpointSection
from benchbox.store.files import read_json, write_json
from benchbox.trainer.checkpoint import CheckpointManager
from benchbox.trainer.checkpoint_validation import CheckpointValidation, _data, _numbers, open_validated_samples
from tests.support.datasets import write_robot
from tests.support.policy_batches import build

if TYPE_CHECKING:
    from benchbox.registry.contracts import BatchSpec


def test_fast_tokens_are_those_that_the_policy_has_learned_whatever_is_validated(tmp_path: Path) -> None:
    """A tokenizer that is trained on other frames gives the same ids to other actions."""
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(sample_path())),), validation=0.3)
    trained = Cell(policy="pi05", size="tiny", backend="single", world_size=1, batch=2, data=data)
    with torch.device("meta"):
        spec = build_policy("pi05", "tiny", Axes(cams=2)).batch_spec()
    learned = open_samples(data, spec, trained.seed).fast
    other = write_robot(tmp_path / "robot", cameras={"top": (16, 16)}, lengths=(9, 9))
    for validated in (replace(data, validation=0.0), replace(data, datasets=(DatasetSpec(path=str(other)),))):
        samples, apart = open_validated_samples(trained, validated, spec), open_samples(validated, spec, trained.seed)
        chunks = [part.chunk(index) for part in samples._parts for index in range(0, len(part), 3)]
        expected = [learned.encode(chunk) for chunk in chunks]
        assert [part.fast.encode(chunk) for part in samples._parts for chunk in chunks] == expected
        assert [apart.fast.encode(chunk) for chunk in chunks] != expected


def trained_on(tmp_path: Path, policy: str, **cameras: tuple[str, ...]) -> Cell:
    """Return the cell of a training on datasets with these cameras, by their names."""
    datasets = tuple(
        DatasetSpec(path=str(write_robot(tmp_path / name, cameras=dict.fromkeys(names, (16, 16)), lengths=(5,) * 10)))
        for name, names in cameras.items()
    )
    data = DataSpec(kind="lerobot", datasets=datasets, validation=0.3)
    return Cell(policy=policy, size="tiny", backend="single", world_size=1, batch=2, cams=2, data=data)


def spec_of(policy: str) -> BatchSpec:
    with torch.device("meta"):
        return build_policy(policy, "tiny", Axes(cams=2)).batch_spec()


def other_data(trained: Cell, path: Path) -> DataSpec:
    return replace(trained.data, datasets=(DatasetSpec(path=str(path)),), validation=0.0)


def test_a_camera_of_other_data_is_in_the_slot_that_its_name_had_in_the_training(tmp_path: Path) -> None:
    trained = trained_on(tmp_path, "pi0", first=("top",), second=("wrist", "top"))
    swapped = write_robot(tmp_path / "swapped", cameras={"wrist": (16, 16), "top": (16, 16)}, lengths=(5,))
    alone = write_robot(tmp_path / "alone", cameras={"wrist": (16, 16)}, lengths=(5,))
    unknown = write_robot(tmp_path / "unknown", cameras={"left": (16, 16)}, lengths=(5,))
    masks = {}
    for path in (swapped, alone, unknown):
        samples = open_validated_samples(trained, other_data(trained, path), spec_of("pi0"))
        masks[path.name] = (samples.cameras, samples.sample(0, 0)["image_mask"][-1].tolist())
    assert masks == {
        "swapped": (("top", "wrist"), [True, True]),
        "alone": (("top", "wrist"), [False, True]),
        "unknown": (("left",), [True, False]),
    }


def test_without_the_datasets_of_the_training_cameras_are_those_of_a_training_on_the_validated_data(tmp_path: Path) -> None:
    """A policy with FAST tokens needs them: its tokenizer is trained from them."""
    other = write_robot(tmp_path / "other", cameras={"wrist": (16, 16), "top": (16, 16)}, lengths=(5,))
    for policy in ("pi0", "pi05"):
        trained = trained_on(tmp_path / policy, policy, first=("top",))
        shutil.rmtree(tmp_path / policy)
        if policy == "pi0":
            assert open_validated_samples(trained, other_data(trained, other), spec_of(policy)).cameras == ("wrist", "top")
        else:
            with pytest.raises(DataError, match="first"):
                open_validated_samples(trained, other_data(trained, other), spec_of(policy))


def test_a_dataset_of_the_training_is_validated_on_the_episodes_that_the_training_held_out(tmp_path: Path) -> None:
    """A division of the dataset alone would hold out others, which the policy was trained on."""
    trained = trained_on(tmp_path, "pi0", first=("top",), second=("top",))
    samples = open_samples(trained.data, spec_of("pi0"), trained.seed)
    numbers = _numbers(trained.data, Path(f"{tmp_path}/first/../second"))
    assert numbers == [1]
    assert _data(trained, CheckpointValidation(data=tmp_path / "second"), is_other=False) == trained.data
    alone = open_samples(replace(trained.data, datasets=trained.data.datasets[1:]), spec_of("pi0"), trained.seed)
    held_out = samples.validation_segments(numbers) - samples.members[0].selection.frames
    assert held_out.tolist() != alone.validation_segments().tolist()
    assert held_out.tolist() == samples.members[1].selection.validation.tolist()
    assert _numbers(trained.data, tmp_path / "third") is None


def robot(root: Path, episodes: int) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    return write_robot(root, cameras={"top": (16, 16)}, lengths=(5,) * episodes)


def checkpoint_of(folder: Path, policy: str, *roots: Path) -> Path:
    """Return a checkpoint of a training on these datasets."""
    datasets = tuple(DatasetSpec(path=str(root)) for root in roots)
    data = DataSpec(kind="lerobot", datasets=datasets, validation=0.3, workers=0)
    cell = Cell(policy=policy, size="tiny", backend="single", world_size=1, batch=2, cams=1, data=data)
    module = build(policy, "tiny")
    samples = open_samples(data, module.batch_spec(), cell.seed)
    session = build_session(cell, module, samples.statistics)
    manager = CheckpointManager(folder, cell, CheckpointSection(background=False), data=digest_datasets(samples))
    return manager.save(session, 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a training on a dataset of 10 episodes, which then grew to 13."""
    folder = tmp_path_factory.mktemp("training")
    checkpoint = checkpoint_of(folder, "pi05", robot(folder / "robot", 10))
    robot(folder / "robot", 13)
    return checkpoint


def validate(checkpoint: Path, out: Path, *options: str) -> tuple[str, list[str]]:
    """Return the output of `benchbox validate`, and the changes of the data that its record states."""
    result = CliRunner().invoke(app, ["validate", str(checkpoint), "--max-samples", "2", "--out", str(out), *options])
    if result.exception is not None:
        raise result.exception
    return result.output, read_json(out)["data_changes"]


def test_episodes_that_were_trained_on_are_not_held_out_after_the_dataset_has_grown(saved: Path, tmp_path: Path) -> None:
    """The division of 13 episodes holds out others than that of 10: the loss would be that of a training set."""
    root = saved.parent / "robot"
    for options in ((), ("--data", str(root))):
        with pytest.raises(ConfigurationError) as refused:
            validate(saved, tmp_path / "v.json", *options)
        hint = "validate on the data that it was trained on, or with --all-episodes, or on other data with --data"
        assert str(refused.value) == f"{saved}: other data: {root}: 10 episodes then, 13 now; {hint}"


def test_a_dataset_of_a_mixture_is_validated_though_another_one_has_grown(tmp_path: Path) -> None:
    """Its held-out episodes and its statistics are those of the training; FAST tokens, which pi0 has not, would be others."""
    same, grown = robot(tmp_path / "same", 10), robot(tmp_path / "grown", 10)
    checkpoint = checkpoint_of(tmp_path, "pi0", same, grown)
    robot(grown, 13)
    for options in ((), ("--all-episodes",)):
        assert validate(checkpoint, tmp_path / "v.json", "--data", str(same), *options)[1] == []
    with pytest.raises(ConfigurationError, match="10 episodes then, 13 now"):
        validate(checkpoint, tmp_path / "v.json", "--data", str(grown))
    with pytest.raises(ConfigurationError, match="10 episodes then, 13 now"):
        validate(checkpoint, tmp_path / "v.json")


def test_a_dataset_that_holds_out_no_episode_is_named_with_the_options_that_validate_others(tmp_path: Path) -> None:
    single = robot(tmp_path / "single", 1)
    checkpoint = checkpoint_of(tmp_path, "pi0", robot(tmp_path / "several", 3), single)
    with pytest.raises(ConfigurationError) as refused:
        validate(checkpoint, tmp_path / "v.json", "--data", str(single))
    assert str(refused.value) == (
        f"{single}: no episode is held out, which takes two with frames that are drawn; "
        "--all-episodes validates all, --data names other data"
    )


def test_all_episodes_of_data_that_have_changed_are_validated_with_a_warning(saved: Path, tmp_path: Path) -> None:
    """So are other data, if the policy has learned FAST tokens of those that have changed."""
    root = saved.parent / "robot"
    other = write_robot(tmp_path / "other", cameras={"top": (16, 16)}, lengths=(5, 5))
    for options in ((), ("--data", str(root)), ("--data", str(other))):
        output, changes = validate(saved, tmp_path / "v.json", "--all-episodes", *options)
        assert changes == [f"{root}: 10 episodes then, 13 now"]
        assert (
            f"warning: the data of the training have changed, perhaps also their statistics or FAST tokens: {root}: 10"
            in output
        )


def test_data_that_are_the_same_and_checkpoints_that_state_none_are_validated_as_before(saved: Path, tmp_path: Path) -> None:
    checkpoint, root = shutil.copytree(saved, tmp_path / saved.name), saved.parent / "robot"
    manifest = read_json(checkpoint / "checkpoint.json")
    write_json(checkpoint / "checkpoint.json", manifest | {"data": None, "crc32": None})
    assert validate(checkpoint, tmp_path / "v.json")[1] == []
    robot(root, 10)
    try:
        for options in ((), ("--all-episodes",)):
            assert validate(saved, tmp_path / "v.json", *options)[1] == []
    finally:
        robot(root, 13)
