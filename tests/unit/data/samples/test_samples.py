"""A sample is the window a policy asked for, and says what in it is real."""

import json
import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.data.dataset.frame_images import letterbox
from benchbox.data.loading.loader import open_samples, open_stream
from benchbox.data.samples.windows import DatasetSamples
from benchbox.data.text.prompt import EOS, ByteTokenizer
from benchbox.errors import ConfigurationError, DataError
from benchbox.spec.cell import DataSpec
from tests.support.datasets import annotate, read_index


@pytest.fixture
def spec(spec):
    return replace(spec, image_size=(32, 48))  # that of the front camera: its bars stay readable


@pytest.fixture
def samples(dataset_root, spec):
    return DatasetSamples(open_dataset(dataset_root), spec, seed=0)


def test_the_current_frame_is_last_and_history_goes_back_frame_by_frame(samples):
    sample = samples.sample(0, 20)
    assert [read_index(sample["images"][t, 0]) for t in range(3)] == [18, 19, 20]
    assert sample["image_mask"].all()
    states = [samples.dataset[i]["observation.state"] for i in (18, 19, 20)]
    assert torch.equal(sample["state"][:, :3], torch.stack(states))


def test_history_before_the_start_of_an_episode_is_black_and_masked(samples):
    sample = samples.sample(0, 15)  # the second frame of its episode
    assert sample["image_mask"][:, 0].tolist() == [False, True, True]
    assert sample["images"][0].max() == 0
    assert [read_index(sample["images"][t, 0]) for t in (1, 2)] == [14, 15]
    assert torch.equal(sample["state"][0], sample["state"][1])


def test_dimensions_the_dataset_lacks_are_zero_and_masked(samples):
    sample = samples.sample(0, 5)
    assert sample["action_dim_mask"].tolist() == [True, True, False, False, False, False]
    assert sample["action"][:, 2:].abs().max() == 0
    assert sample["state"].shape == (3, 8)
    assert sample["state"][:, 3:].abs().max() == 0


def test_provenance_is_carried(samples):
    sample = samples.sample(0, 16)
    assert [int(sample[name]) for name in ("dataset_index", "episode_index", "frame_index")] == [0, 2, 2]


def test_cameras_the_dataset_lacks_are_black_and_masked(dataset_root, spec):
    sample = DatasetSamples(open_dataset(dataset_root), replace(spec, cameras=4), seed=0).sample(0, 20)
    assert sample["image_mask"][-1].tolist() == [True, True, False, False]
    assert sample["images"][:, 2:].max() == 0


def test_fewer_cameras_are_the_first_the_dataset_lists(dataset_root, spec):
    sample = DatasetSamples(open_dataset(dataset_root), replace(spec, cameras=1), seed=0).sample(0, 20)
    assert sample["images"].shape[1] == 1
    assert read_index(sample["images"][-1, 0]) == 20


@pytest.mark.parametrize(
    ("shape", "size", "inside"),
    [
        ((20, 40), (40, 40), (slice(10, 30), slice(0, 40))),  # bars above and below
        ((40, 20), (20, 20), (slice(0, 20), slice(5, 15))),  # bars left and right
        ((10, 10), (30, 31), (slice(0, 30), slice(0, 30))),
    ],
)
def test_letterboxing_keeps_proportions_between_black_bars(shape, size, inside):
    out = letterbox(torch.full((3, *shape), 200, dtype=torch.uint8), size)
    expected = torch.zeros(3, *size, dtype=torch.uint8)
    expected[:, *inside] = 200
    assert torch.equal(out, expected)


def test_letterboxing_halves_by_averaging():
    rows = torch.arange(0, 16, dtype=torch.uint8).repeat_interleave(2)[None, :, None].expand(3, 32, 32)
    out = letterbox(rows, (16, 16))
    assert (out[0, :, 3].int() - torch.arange(16)).abs().max() <= 1


def test_the_prompt_is_the_task_and_the_state_in_quantile_bins(samples):
    sample = samples.sample(0, 13)
    text = ByteTokenizer(300).decode(sample["prompt_tokens"][sample["prompt_mask"]].tolist())
    stats = samples.dataset.statistics["observation.state"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    state = samples.dataset[13]["observation.state"].numpy()
    bins = np.clip(np.floor((state - low) / (high - low) * 256), -1, 255).astype(int)
    assert text == f"Task: open the drawer, State: {bins[0]} {bins[1]} {bins[2]};\n"
    assert sample["prompt_tokens"][~sample["prompt_mask"]].unique().tolist() == [0]


def test_a_state_that_is_exactly_the_first_quantile_is_in_the_first_bin(dataset_root, bare_spec):
    """A closed gripper is not below the range of its own dataset, in openpi and LeRobot either."""
    dataset = open_dataset(dataset_root)
    spec = replace(bare_spec, prompt_end="")
    for frame in range(10):
        lowest = dataset.column("observation.state", frame, frame + 1)[0]
        dataset.statistics["observation.state"] |= {"q01": lowest.tolist(), "q99": (lowest + 0.7).tolist()}
        row = DatasetSamples(dataset, spec, seed=0).sample(0, frame)
        prompt = ByteTokenizer(259).decode(row["prompt_tokens"][row["prompt_mask"]].tolist())
        assert prompt == "Task: push the red block, State: 0 0 0;\n"


def test_without_the_state_the_prompt_is_the_same_for_every_frame_of_a_task(dataset_root, spec):
    samples = DatasetSamples(open_dataset(dataset_root), replace(spec, state_in_prompt=False), seed=0)
    assert torch.equal(samples.sample(0, 14)["prompt_tokens"], samples.sample(0, 30)["prompt_tokens"])


def test_dataset_and_synthetic_samples_have_the_same_table(dataset_root, full_spec):
    from benchbox.data.samples.synthetic import SyntheticSamples

    def table(sample):
        return {name: (value.shape, value.dtype) for name, value in sample.items()}

    samples = open_samples(DataSpec(kind="lerobot", path=str(dataset_root)), full_spec, 0)
    assert table(samples.sample(0, 0)) == table(SyntheticSamples(full_spec, seed=0).sample(0, 0))


def test_samples_made_together_are_those_made_one_by_one(dataset_root, full_spec):
    """Bit for bit, over the start and the end of an episode, whose windows overlap."""
    samples = DatasetSamples(open_dataset(dataset_root), full_spec, seed=0)
    samples.fast = open_samples(DataSpec(kind="lerobot", path=str(dataset_root)), full_spec, 0).fast
    episode = samples.dataset.episode_of(20)
    together = samples.samples(3, episode.from_index, episode.to_index)
    for row, index in enumerate(range(episode.from_index, episode.to_index)):
        alone = samples.sample(3, index)
        assert alone.keys() == together.keys()
        assert {name for name, value in alone.items() if not torch.equal(value, together[name][row])} == set()


def test_steps_before_the_episode_are_masked(samples):
    assert samples.sample(0, 15)["history_mask"].tolist() == [False, True, True]  # the second frame of its episode
    assert samples.sample(0, 13)["history_mask"].tolist() == [False, False, True]  # an episode of one frame
    assert samples.sample(0, 20)["history_mask"].all()


def test_future_frames_follow_the_current_one_and_past_the_end_repeat_the_last(dataset_root, spec):
    samples = DatasetSamples(open_dataset(dataset_root), replace(spec, future=4), seed=0)

    def future(index):
        sample = samples.sample(0, index)
        return [read_index(image[0]) for image in sample["future_images"]], sample["future_mask"].tolist()

    assert future(2) == ([3, 4, 5, 6], [True] * 4)
    assert future(10) == ([11, 12, 12, 12], [True, True, False, False])  # the last but two of an episode of 13
    assert future(13) == ([13] * 4, [False] * 4)  # an episode of one frame


def test_the_return_counts_the_steps_left_in_lengths_of_the_longest_episode(dataset_root, spec):
    samples = DatasetSamples(open_dataset(dataset_root), replace(spec, returns=True), seed=0)
    returns = [float(samples.sample(0, index)["returns"]) for index in (0, 12, 13, 14, 33)]  # episodes of 13, 1 and 20 frames
    assert returns == pytest.approx([-12 / 20, 0, 0, -19 / 20, 0])


def test_what_no_one_said_is_masked(dataset_root, full_spec):
    sample = DatasetSamples(open_dataset(dataset_root), full_spec, seed=0).sample(0, 5)
    for name in ("response", "memory", "metadata", "subgoal"):
        assert not sample[f"{name}_mask"].any()
    assert not sample["subgoal_images"].any()
    assert not sample["field_of_view"].any()


def words(sample, name):
    tokens = sample[f"{name}_tokens"][sample[f"{name}_mask"]].tolist()
    return ByteTokenizer(300).decode(tokens), bool(tokens) and tokens[-1] == EOS


SUBTASKS = ("reach the block", "push it")


@pytest.fixture
def text_spec(full_spec):
    return replace(full_spec, image_size=(32, 48), response_tokens=24, memory_tokens=24, metadata=(3, 16))


def test_a_subtask_of_lerobot_is_the_response_and_leads_to_its_last_frame(dataset_root, text_spec, tmp_path):
    """Subtask 0 up to frame 4, 1 up to frame 9, then none; the next episode begins within subtask 1 and stays there."""
    numbers = [0] * 5 + [1] * 5 + [-1] * 3 + [1] + [1] * 8 + [0] * 12
    root = annotate(dataset_root, tmp_path / "annotated", {"subtask_index": numbers}, SUBTASKS)
    samples = DatasetSamples(open_dataset(root), text_spec, seed=0)
    for index, subtask, goal in [(0, 0, 4), (4, 0, 4), (7, 1, 9), (13, 1, 13), (14, 1, 21), (30, 0, 33)]:
        sample = samples.sample(0, index)
        assert words(sample, "response") == (SUBTASKS[subtask], True)
        assert sample["subgoal_mask"].all()
        assert [read_index(image) for image in sample["subgoal_images"][:1]] == [goal]
    unsaid = samples.sample(0, 11)
    assert not unsaid["response_mask"].any()
    assert not unsaid["subgoal_mask"].any()


def test_text_features_are_the_response_the_memory_and_metadata(dataset_root, text_spec, tmp_path):
    columns = {
        "response": ["grasp"] * 3 + [""] * 31,
        "memory": [f"seen {index}" for index in range(34)],
        "metadata.speed": ["fast"] * 34,
        "note": ["of the operator"] * 34,
        "metadata.quality": ["good"] * 10 + [""] * 24,
        "subtask_index": [0] * 34,
    }
    root = annotate(dataset_root, tmp_path / "annotated", columns, SUBTASKS)
    samples = DatasetSamples(open_dataset(root), text_spec, seed=0)
    sample = samples.sample(0, 1)
    assert words(sample, "response") == ("grasp", True)  # before the subtask
    assert read_index(sample["subgoal_images"][0]) == 2
    assert words(sample, "memory") == ("seen 1", True)
    assert words(sample, "metadata") == ("speed: fast, quality: good, ", False)
    assert sample["metadata_mask"].any(1).tolist() == [True, True, False]
    later = samples.sample(0, 12)
    assert not later["response_mask"].any()
    assert later["metadata_mask"].any(1).tolist() == [True, False, False]
    one_field = DatasetSamples(open_dataset(root), replace(text_spec, metadata=(1, 16)), seed=0).sample(0, 1)
    assert words(one_field, "metadata") == ("speed: fast, ", False)


def test_the_prompt_remembers_the_memory_of_the_frame_before_in_the_episode(dataset_root, text_spec, tmp_path):
    columns = {"memory": [f"seen {index}" for index in range(34)], "response": ["grasp"] * 34}
    root = annotate(dataset_root, tmp_path / "annotated", columns)
    spec = replace(text_spec, prompt_template="{task}: {memory}", state_in_prompt=False, response_template="Subtask: {text}, ")
    samples = DatasetSamples(open_dataset(root), spec, seed=0)
    texts = [words(samples.sample(0, index), "prompt")[0] for index in (0, 1, 13, 14, 15)]
    assert [text.split(": ")[1] for text in texts] == ["", "seen 0", "", "", "seen 14"], "episodes begin at 0, 13 and 14"
    assert words(samples.sample(0, 1), "response") == ("Subtask: grasp, ", False)


def test_a_subtask_that_is_not_in_the_table_is_named_with_its_file(dataset_root, text_spec, tmp_path):
    root = annotate(dataset_root, tmp_path / "annotated", {"subtask_index": [2] * 34}, SUBTASKS)
    with pytest.raises(DataError, match=r"meta/subtasks\.parquet: no subtask 2, which frame 3 names"):
        DatasetSamples(open_dataset(root), text_spec, seed=0).sample(0, 3)


def test_a_missing_text_is_an_empty_one(dataset_root, text_spec, tmp_path):
    root = annotate(dataset_root, tmp_path / "annotated", {"memory": ["seen", *[None] * 33]})
    samples = DatasetSamples(open_dataset(root), text_spec, seed=0)
    assert words(samples.sample(0, 0), "memory") == ("seen", True)
    assert not samples.sample(0, 1)["memory_mask"].any()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"state_dim": 2}, DataError, r"observation\.state has 3 dimensions, and the policy takes 2"),
        ({"action_dim": 1}, DataError, "action has 2 dimensions, and the policy takes 1"),
        ({"text_vocab": 258}, ConfigurationError, "text_vocab is 258"),
        ({"fast_vocab": 40}, ConfigurationError, "fast_vocab is 40, and chunks of 5 steps need at least"),
    ],
)
def test_a_policy_the_dataset_cannot_serve_is_refused_at_once(dataset_root, spec, change, error, says):
    with pytest.raises(error, match=says):
        open_samples(DataSpec(kind="lerobot", path=str(dataset_root)), replace(spec, **change), 0)


def test_a_missing_statistic_is_named_with_its_file(dataset_root, spec, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "old")
    stats = json.loads((root / "meta/stats.json").read_text())
    del stats["observation.state"]["q01"], stats["observation.state"]["count"]
    (root / "meta/stats.json").write_text(json.dumps(stats))
    dataset = open_dataset(root)
    with pytest.raises(DataError, match=r"stats\.json, observation\.state: quantile normalisation needs the statistic 'q01'"):
        DatasetSamples(dataset, spec, seed=0)
    DatasetSamples(dataset, replace(spec, state_normalisation="mean_std"), seed=0)  # count is not needed


def stream(root, spec, workers, start_step=0, batch=3):
    return open_stream(
        DataSpec(kind="lerobot", path=str(root), workers=workers),
        spec,
        batch=batch,
        accumulation=1,
        rank=0,
        world_size=1,
        seed=3,
        start_step=start_step,
    )


def test_worker_processes_give_the_batches_of_the_main_process(dataset_root, spec):
    alone, shared = stream(dataset_root, spec, workers=0), stream(dataset_root, spec, workers=2)
    for left, right in islice(zip(alone, shared, strict=True), 25):  # past the end of the first epoch
        assert all(torch.equal(left[name], right[name]) for name in left)
    shared.close()


def test_a_dataset_stream_continues_bit_for_bit(dataset_root, spec):
    straight = list(islice(stream(dataset_root, spec, workers=0), 16))
    resumed = list(islice(stream(dataset_root, spec, workers=0, start_step=12), 4))
    for left, right in zip(straight[12:], resumed, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_opening_a_stream_leaves_the_generator_of_the_process_alone(dataset_root, spec):
    before = torch.get_rng_state()
    next(stream(dataset_root, spec, workers=0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_met_in_a_worker_is_one_line_that_names_it(dataset_root, spec, tmp_path, workers):
    root = shutil.copytree(dataset_root, tmp_path / "damaged")
    video = root / "videos/observation.images.wrist/chunk-000/file-000.mp4"
    video.write_bytes(b"not a video")
    batches = stream(root, spec, workers)
    with pytest.raises(DataError) as caught:
        next(batches)
    batches.close()
    assert str(caught.value).startswith(f"{video}: not readable as video")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("feature", "statistic", "value", "says"),
    [
        ("action", "std", [1.0, float("nan")], "statistic 'std' is nan in dimension 1"),
        ("action", "mean", [float("-inf"), 0.0], "statistic 'mean' is -inf in dimension 0"),
        ("action", "mean", [0.0, 1e39], "statistic 'mean' is 1e+39 in dimension 1"),
        ("observation.state", "q01", ["low", 0.0, 0.0], "statistic 'q01' holds ['low', 0.0, 0.0], and a list of numbers"),
        ("observation.state", "q99", [None, 0.0, 0.0], "statistic 'q99' holds [None, 0.0, 0.0], and a list of numbers"),
        ("observation.state", "q99", {"x": 1.0}, "statistic 'q99' holds {'x': 1.0}, and a list of numbers"),
        ("observation.state", None, 5, "holds 5, and statistics by name are expected"),
    ],
)
def test_a_statistic_that_is_no_finite_number_is_named_with_its_file_and_feature(
    dataset_root, spec, tmp_path, feature, statistic, value, says
):
    root = shutil.copytree(dataset_root, tmp_path / "copy")
    file = root / "meta/stats.json"
    stats = json.loads(file.read_text())
    stats[feature] = value if statistic is None else stats[feature] | {statistic: value}
    file.write_text(json.dumps(stats))
    with pytest.raises(DataError) as raised:
        DatasetSamples(open_dataset(root), replace(spec, fast_tokens=0, state_in_prompt=False), seed=0)
    assert str(raised.value).startswith(f"{file}, {feature}: {says}")
    assert "\n" not in str(raised.value)


def test_a_statistic_that_no_mode_of_the_policy_uses_may_be_anything(dataset_root, spec, tmp_path):
    root = shutil.copytree(dataset_root, tmp_path / "copy")
    file = root / "meta/stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["max"] = [float("inf"), None]
    file.write_text(json.dumps(stats))
    assert len(DatasetSamples(open_dataset(root), replace(spec, fast_tokens=0), seed=0)) > 0


def test_statistics_for_the_policy_are_those_of_state_and_action(dataset_root, spec):
    (statistics,) = stream(dataset_root, spec, workers=0).statistics
    assert set(statistics) == {"observation.state", "action"}
    assert statistics["action"]["max"] == pytest.approx([3.3, 0])


def test_a_lerobot_stream_needs_a_path(spec):
    with pytest.raises(ConfigurationError, match="needs the path"):
        open_stream(DataSpec(kind="lerobot"), spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0)


def test_an_unknown_kind_of_data_is_refused(spec):
    with pytest.raises(ConfigurationError, match="unknown kind of data 'smaple'"):
        open_stream(DataSpec(kind="smaple"), spec, batch=1, accumulation=1, rank=0, world_size=1, seed=0)
