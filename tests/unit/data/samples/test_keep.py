"""Keep-ranges: which frames are drawn, and what is said about files that are wrong."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.samples.mixture import MixtureSamples, select_datasets
from benchbox.data.samples.selection import select_frames
from benchbox.errors import BenchboxError, ConfigurationError
from benchbox.spec.datasets import DatasetSpec

RANGES = {"0": [[2, 5], [9, 13]], "2": [[0, 20]]}  # of the lengths 13, 1 and 20


@pytest.fixture
def keep(tmp_path):
    def write(values) -> str:
        path = tmp_path / "keep.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return write


def samples(root, spec, file, **of):
    dataset = open_dataset(root)
    return MixtureSamples(
        select_datasets([(dataset, DatasetSpec(path=str(root), keep=file))], **({"validation": 0.0, "seed": 0} | of)), spec, 0
    )


def indices(group):
    return [group.index_of(number) for number in range(len(group))]


def test_only_frames_within_the_ranges_are_drawn(dataset_root, bare_spec, keep):
    (group,) = samples(dataset_root, bare_spec, keep(RANGES)).groups()
    assert indices(group) == [2, 3, 4, 9, 10, 11, 12, *range(14, 34)]
    (group,) = samples(dataset_root, bare_spec, keep({"0": [[2, 5], [5, 7]]})).groups()
    assert indices(group) == [2, 3, 4, 5, 6], "a range may begin where another one ends"


def test_frames_outside_the_ranges_may_still_be_in_windows(dataset_root, bare_spec, keep):
    kept, all_frames = samples(dataset_root, bare_spec, keep(RANGES)), samples(dataset_root, bare_spec, None)
    left, right = kept.sample(0, 4), all_frames.sample(0, 4)
    assert all((left[name] == right[name]).all() for name in left)
    assert left["history_mask"].all()  # frame 2 is kept, 3 and 4 come after it
    assert not left["action_is_pad"].any()  # the chunk ends in frame 8, which is not kept


def test_a_parquet_file_keeps_what_the_json_file_keeps(dataset_root, bare_spec, keep, tmp_path):
    rows = [(int(episode), *pair) for episode, pairs in reversed(RANGES.items()) for pair in pairs]
    file = tmp_path / "keep.parquet"
    pd.DataFrame(rows, columns=["episode_index", "start", "stop"]).to_parquet(file)
    (left,), (right,) = (samples(dataset_root, bare_spec, name).groups() for name in (str(file), keep(RANGES)))
    assert indices(left) == indices(right)


def test_what_is_kept_is_counted(dataset_root, keep):
    selection = select_frames(open_dataset(dataset_root).episodes, keep(RANGES))
    assert selection.kept == "keeps 27 of 34 frames in 2 of 3 episodes"
    assert (selection.kept_frames, selection.kept_episodes, selection.frames, selection.episodes) == (27, 2, 34, 3)


def test_the_fast_tokenizer_learns_from_frames_that_are_kept(dataset_root, spec, keep):
    opened = samples(dataset_root, replace(spec, fast_vocab=300), keep({"0": [[2, 5]]}))
    assert len(list(opened._fast_chunks())) == 3


WRONG = {
    "not JSON": ("{", "not readable as JSON"),
    "a list": ([[0, 1, 2]], 'expected {"<episode>": [[start, stop], ...]}'),
    "a number": ("7", 'expected {"<episode>"'),
    "nothing": ({}, "keeps no frame; name at least one range"),
    "an unknown episode": ({"7": [[0, 1]]}, "episode '7', range 0: the dataset has no episode 7"),
    "an episode by name": ({"first": [[0, 1]]}, "episode 'first': the key is not the number of an episode"),
    "an empty range": ({"0": [[3, 3]]}, "episode '0', range 0: the range 3 to 3 of episode 0 is empty"),
    "a reversed range": ({"0": [[0, 1], [5, 3]]}, "episode '0', range 1: the range 5 to 3 of episode 0 is reversed"),
    "overlapping ranges": (
        {"2": [[4, 9], [0, 5]]},
        "episode '2', range 0: frames 4 to 9 overlap with 0 to 5, episode '2', range 1",
    ),
    "past the end": ({"0": [[0, 14]]}, "episode '0', range 0: stop is 14, and episode 0 has 13 frames"),
    "before the start": ({"0": [[-1, 4]]}, "episode '0', range 0: start is -1"),
    "no pair": ({"0": [[1, 2, 3]]}, "episode '0', range 0: expected [start, stop]"),
    "a mapping": ({"0": {"1": 2}}, "episode '0', range 0: expected [start, stop]"),
    "no list": ({"0": 3}, "episode '0': expected a list of ranges"),
    "a fraction": ({"0": [[0, 1.5]]}, "episode '0', range 0: episode, start and stop are 0, 0, 1.5, and whole numbers"),
    "a key twice": ('{"0": [[0, 1]], "0": [[2, 3]]}', "episode '0': the key occurs twice"),
    "a huge number": ({"0": [[0, 10**30]]}, "episode '0', range 0: stop is 1000000000000000000000000000000, and episode 0 has"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_line_with_file_and_key(dataset_root, keep, name):
    values, says = WRONG[name]
    file = keep(values)
    with pytest.raises(BenchboxError) as caught:
        select_frames(open_dataset(dataset_root).episodes, file)
    assert str(caught.value).startswith(file)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_wrong_range_has_a_line(dataset_root, keep):
    with pytest.raises(ConfigurationError) as caught:
        select_frames(open_dataset(dataset_root).episodes, keep({"0": [[0, 99]], "5": [[0, 1]], "1": [[0, 1]], "2": [[4, 4]]}))
    assert ["'0'" in str(caught.value.problems[0]), len(caught.value.problems)] == [True, 3]
    with pytest.raises(ConfigurationError) as caught:
        select_frames(open_dataset(dataset_root).episodes, keep({str(number): [[0, 1]] for number in range(100, 150)}))
    assert len(caught.value.problems) == 21
    assert str(caught.value.problems[-1]).endswith("30 more problems of this kind")


PARQUET = {
    "a missing column": ({"episode_index": [0], "start": [0]}, "no column 'stop'"),
    "a damaged row": ({"episode_index": [0, 9], "start": [0, 0], "stop": [1, 2]}, "row 1: the dataset has no episode 9"),
    "an empty cell": ({"episode_index": [0], "start": [None], "stop": [3]}, "row 0: episode, start and stop are 0, None, 3"),
    "text": ({"episode_index": [0], "start": ["a"], "stop": [3]}, "row 0: episode, start and stop are 0, a, 3"),
}


@pytest.mark.parametrize("name", PARQUET)
def test_a_wrong_parquet_file_is_one_line_with_file_and_row(dataset_root, tmp_path, name):
    values, says = PARQUET[name]
    file = tmp_path / "keep.parquet"
    pd.DataFrame(values).to_parquet(file)
    with pytest.raises(BenchboxError) as caught:
        select_frames(open_dataset(dataset_root).episodes, str(file))
    assert str(caught.value).startswith(str(file))
    assert says in str(caught.value)
    file.write_bytes(b"damaged")
    with pytest.raises(BenchboxError, match="not readable as Parquet"):
        select_frames(open_dataset(dataset_root).episodes, str(file))
    file.unlink()
    with pytest.raises(BenchboxError, match="the file is missing"):
        select_frames(open_dataset(dataset_root).episodes, str(file))
