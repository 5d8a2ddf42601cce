"""Episodes that are not trained on: chosen by the seed, the same in every process."""

import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.samples.mixture import MixtureSamples, select_datasets
from benchbox.data.samples.selection import check_not_empty, select_frames, validation_episodes
from benchbox.errors import DataError
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_robot

LENGTHS = (4, 3, 5, 2, 6, 3, 4, 2, 3, 5)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_robot(tmp_path_factory.mktemp("data") / "ten", cameras={"top": (24, 24)}, lengths=LENGTHS)


def split(root, fraction, seed=0, **of):
    return select_frames(open_dataset(root).episodes, validation=fraction, seed=seed, **of)


def frames(segments):
    return {frame for start, stop in segments for frame in range(start, stop)}


def test_training_and_validation_are_whole_episodes_that_share_no_frame(root):
    selection = split(root, 0.3)
    assert (selection.training_episodes, selection.validation_episodes) == (7, 3)
    assert frames(selection.training) | frames(selection.validation) == set(range(sum(LENGTHS)))
    assert not frames(selection.training) & frames(selection.validation)
    starts = np.cumsum([0, *LENGTHS])
    episodes = {(int(start), int(stop)) for start, stop in pairwise(starts)}
    assert {tuple(segment) for segment in selection.validation.tolist()} < episodes


@pytest.mark.parametrize(
    ("episodes", "fraction", "validation"),
    [(10, 0.0, 0), (10, 0.01, 1), (10, 0.25, 2), (10, 0.99, 9), (2, 0.01, 1), (1, 0.5, 0)],
)
def test_at_least_one_episode_of_two_is_chosen_and_never_all(episodes, fraction, validation):
    assert len(validation_episodes(np.arange(episodes), episodes, fraction, seed=0)) == validation


def test_the_seed_and_nothing_else_decides(root):
    script = (
        "import sys; from benchbox.data import open_dataset; from benchbox.data.samples.selection import select_frames\n"
        "print(select_frames(open_dataset(sys.argv[1]).episodes, validation=0.3, seed=5).validation.tolist())"
    )
    elsewhere = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True).stdout
    assert elsewhere.strip() == str(split(root, 0.3, seed=5).validation.tolist())
    assert len({str(split(root, 0.3, seed=seed).validation) for seed in range(8)}) > 1
    assert len({str(split(root, 0.3, dataset=number).validation) for number in range(8)}) > 1


def test_an_episode_of_which_nothing_is_kept_is_in_neither_part(root, tmp_path):
    file = tmp_path / "keep.json"
    file.write_text('{"3": [[0, 1]], "8": [[1, 3]]}')
    selection = split(root, 0.5, keep=str(file))
    assert (selection.training_episodes, selection.validation_episodes, selection.kept_frames) == (1, 1, 3)


def test_a_dataset_without_episodes_is_refused_by_its_name():
    selection = select_frames([], validation=0.3)
    assert (selection.frames, selection.training_episodes, selection.validation_episodes) == (0, 0, 0)
    with pytest.raises(DataError, match=r"^robots/empty: the dataset has no frames$"):
        check_not_empty(selection, "robots/empty")


def test_the_segments_of_a_mixture_are_in_its_index_space(root, bare_spec, tmp_path):
    other = shutil.copytree(root, tmp_path / "other")
    opened = [(open_dataset(path), DatasetSpec(path=str(path))) for path in (root, other)]
    members = select_datasets(opened, validation=0.3, seed=2)
    samples = MixtureSamples(members, replace(bare_spec, cameras=1), 2)
    (group,) = samples.groups()
    validation = frames(samples.validation_segments())
    training = {group.index_of(number) for number in range(len(group))}
    assert not training & validation
    assert training | validation == set(range(len(samples)))
    episodes = {tuple(int(samples.sample(0, frame)[f"{key}_index"]) for key in ("dataset", "episode")) for frame in validation}
    assert [sum(dataset == number for dataset, _ in episodes) for number in (0, 1)] == [3, 3]
    assert frames(samples.validation_segments([1])) == {frame for frame in validation if frame >= len(samples) // 2}
    assert frames(samples.training_segments([0])) == {frame for frame in training if frame < len(samples) // 2}
    assert {e for d, e in episodes if d == 0} != {e for d, e in episodes if d == 1}, "each dataset has a split of its own"
