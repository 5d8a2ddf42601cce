"""A digest of a dataset tells whether a resumed training would draw the same samples and hold out the same episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.data import open_dataset
from benchbox.data.loading.loader import open_samples
from benchbox.data.samples import mixture
from benchbox.data.samples.digest import DatasetDigest, data_differences, digest_datasets, digest_state_statistics
from benchbox.registry.contracts import BatchSpec
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_robot

if TYPE_CHECKING:
    from pathlib import Path

SPEC = BatchSpec(cameras=1, image_size=(16, 16), state_dim=3, action_dim=2, horizon=4, prompt_tokens=48, text_vocab=300)
LENGTHS = (4, 3, 5, 2, 6)


def write(root: Path, **options: Any) -> Path:
    return write_robot(root, cameras={"top": (16, 16)}, **{"lengths": LENGTHS, **options})


def digests(root: Path, *, seed: int = 0, keep: Path | None = None, path: str | None = None) -> list[DatasetDigest]:
    """Return the digests of a dataset as a checkpoint has them, under the path at which it was trained on."""
    settings = DatasetSpec(path=str(root), keep=None if keep is None else str(keep))
    data = DataSpec(kind="lerobot", datasets=(settings,), validation=0.4, workers=0)
    (digest,) = digest_datasets(open_samples(data, SPEC, seed))
    return json.loads(json.dumps([digest | {"dataset": path or "robot"}]))


def test_a_dataset_that_is_opened_again_is_the_same(tmp_path: Path) -> None:
    assert list(data_differences(digests(write(tmp_path / "a")), digests(tmp_path / "a"))) == []


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"lengths": (*LENGTHS, 3)}, "5 episodes then, 6 now"),
        ({"lengths": (4, 3, 5, 2, 7)}, "20 frames then, 21 now"),
        ({"lengths": (3, 4, 5, 2, 6)}, "the lengths of its episodes have changed"),
        ({"scale": 2.0}, "the statistics of state and action have changed"),
    ],
)
def test_the_first_difference_of_a_dataset_is_stated(tmp_path: Path, options: dict[str, Any], difference: str) -> None:
    then, now = digests(write(tmp_path / "then")), digests(write(tmp_path / "now", **options))
    assert list(data_differences(then, now)) == [f"robot: {difference}"]


def test_a_fast_tokenizer_that_learned_other_tokens_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no checkpoint, and trained anew when a training goes on."""
    spec = replace(SPEC, fast_tokens=16, fast_vocab=256)
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(write(tmp_path / "a"))),), workers=0)
    then, again = digest_datasets(open_samples(data, spec, 0)), digest_datasets(open_samples(data, spec, 0))
    assert list(data_differences(then, again)) == []
    monkeypatch.setattr(mixture, "FAST_CHUNKS", 1)
    (line,) = data_differences(then, digest_datasets(open_samples(data, spec, 0)))
    assert line.endswith("the tokens of the FAST tokenizer, which is trained on the actions, have changed")
    without = [{key: value for key, value in digest.items() if key != "fast_sha256"} for digest in then]
    assert list(data_differences(without, then)) == [], "of a checkpoint that does not state it"
    assert digest_datasets(open_samples(data, SPEC, 0)) == without, "of a policy without such tokens"


def test_a_keep_file_that_was_edited_is_a_difference(tmp_path: Path) -> None:
    root, keep, edited = write(tmp_path / "a"), tmp_path / "keep.json", tmp_path / "edited.json"
    keep.write_text('{"0": [[0, 3]], "1": [[0, 3]]}')
    for ranges, difference in (
        ('{"0": [[0, 3]], "1": [[0, 2]]}', "6 kept frames then, 5 now"),
        ('{"0": [[1, 4]], "1": [[0, 3]]}', "the frames that are kept have changed"),
    ):
        edited.write_text(ranges)
        assert list(data_differences(digests(root, keep=keep), digests(root, keep=edited))) == [f"robot: {difference}"]


def test_other_episodes_for_validation_are_a_difference(tmp_path: Path) -> None:
    root = write(tmp_path / "a")
    assert list(data_differences(digests(root), digests(root, seed=1))) == ["robot: the episodes for validation have changed"]


def test_statistics_that_another_machine_rounds_otherwise_are_the_same(tmp_path: Path) -> None:
    then, stats = digests(write(tmp_path / "a")), tmp_path / "a/meta/stats.json"
    values = json.loads(stats.read_text())
    values["action"]["mean"] = [value * (1 + 1e-14) for value in values["action"]["mean"]]
    stats.write_text(json.dumps(values))
    assert list(data_differences(then, digests(tmp_path / "a"))) == []


def test_a_digest_that_lacks_a_later_key_is_compared_by_the_others(tmp_path: Path) -> None:
    now = digests(write(tmp_path / "a"))
    then = [{key: value for key, value in now[0].items() if key != "statistics_sha256"}]
    assert list(data_differences(then, now)) == []
    assert list(data_differences([], now)) == ["0 datasets then, 1 now"]


@pytest.mark.parametrize("damaged", [["x", 1.0, 1.0], [[1.0], [1.0, 2.0]], {"a": 1.0}])
def test_a_statistic_without_numbers_is_other_than_one_with_them(tmp_path: Path, damaged: object) -> None:
    """Also if the policy does not normalise by it: the digest is of all of them."""
    statistics = open_dataset(write(tmp_path / "a")).statistics
    state = statistics["observation.state"]
    changed = {**statistics, "observation.state": {**state, "mean": damaged}}
    then, now = (digest_state_statistics("robot", values) for values in (statistics, changed))
    assert list(data_differences([then], [now])) == ["robot: the statistics of the state have changed"]
