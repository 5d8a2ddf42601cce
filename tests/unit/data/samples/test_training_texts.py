"""Checks of the texts of datasets before a training: targets that are missing, and tasks that are cut."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.data import open_dataset
from benchbox.data.samples.mixture import MixtureSamples, select_datasets
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.data.samples.training_texts import check_targets, describe_long_prompts, describe_unseen_data
from benchbox.data.samples.windows import DatasetSamples
from benchbox.errors import ConfigurationError
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import LENGTHS, add_language, annotate, write_dataset

FRAMES = sum(LENGTHS)
SHARED = "put the white mug on the left plate and the yellow mug on the "


@pytest.fixture
def sole_spec(bare_spec):
    """A policy that learns nothing but memory and response."""
    return replace(bare_spec, response_tokens=4, memory_tokens=6, sole_targets=("memory", "response"))


def mixture(spec, *roots: Path) -> MixtureSamples:
    opened = [(open_dataset(root), DatasetSpec(path=str(root))) for root in roots]
    return MixtureSamples(select_datasets(opened, validation=0.0, seed=0), spec, 0)


def write_tasks(root: Path, *tasks: str) -> Path:
    return write_dataset(root, lengths=(2,) * len(tasks), tasks=tasks)


def test_data_without_any_text_that_the_policy_learns_are_refused(dataset_root, sole_spec):
    with pytest.raises(ConfigurationError, match=r"learns only the texts memory and response, and .* has none of them"):
        check_targets(mixture(sole_spec, dataset_root), sole_spec)


@pytest.mark.parametrize("name", ["memory", "response", "subtask_index"])
def test_one_such_text_of_one_dataset_is_enough(dataset_root, sole_spec, tmp_path, name):
    values = [0] * FRAMES if name == "subtask_index" else ["reach"] * FRAMES
    annotated = annotate(dataset_root, tmp_path / "annotated", {name: values}, subtasks=("reach",))
    check_targets(mixture(sole_spec, dataset_root, annotated), sole_spec)


def test_annotations_of_lerobot_0_6_count_as_such_texts(dataset_root, sole_spec, tmp_path):
    annotated = add_language(dataset_root, tmp_path / "annotated", [[] for _ in LENGTHS], {})
    check_targets(mixture(sole_spec, annotated), sole_spec)


def test_other_policies_and_generated_samples_lack_nothing(dataset_root, bare_spec, sole_spec):
    check_targets(mixture(bare_spec, dataset_root), bare_spec)
    check_targets(SyntheticSamples(sole_spec, 0), sole_spec)
    check_targets(SyntheticSamples(sole_spec, 0), None)
    assert describe_long_prompts(SyntheticSamples(sole_spec, 0)) == []


def test_tasks_that_are_cut_are_counted_and_the_longest_is_named_once_per_dataset(dataset_root, bare_spec, tmp_path):
    spec = replace(bare_spec, state_in_prompt=False, prompt_tokens=48)
    root = write_tasks(tmp_path / "data", "a" * 46, "b" * 47, "c" * 60 + "d" * 20)
    (line,) = describe_long_prompts(mixture(spec, dataset_root, root, root))
    longest = "c" * 30 + "..." + "c" * 10 + "d" * 20
    assert line == (
        f"{root}: prompt_tokens is 48, and the ends of 2 of 3 tasks are cut: the longest, '{longest}', takes 80 tokens, and "
        "46 are left; name a tokenizer with fewer tokens per word, choose a policy or size with more prompt_tokens, or shorten "
        "the tasks"
    )


def test_a_policy_that_reads_no_prompt_gets_none_and_no_task_is_cut_for_it(bare_spec, tmp_path):
    spec = replace(bare_spec, state_in_prompt=False, prompt_tokens=0)
    root = write_tasks(tmp_path / "data", "a" * 46, "b" * 470)
    samples = mixture(spec, root)
    assert describe_long_prompts(samples) == []
    for sample in (samples.sample(0, 0), SyntheticSamples(spec, 0).sample(0, 0)):
        assert not {"prompt_tokens", "prompt_mask"} & {*sample, *spec.fields()}
        assert set(spec.fields()) == set(sample)


def test_different_tasks_with_the_same_tokens_are_counted(bare_spec, tmp_path):
    spec = replace(bare_spec, state_in_prompt=False, prompt_tokens=48)
    spelling = SHARED.replace(" ", "_") + "stove"  # of the same words
    root = write_tasks(tmp_path / "data", SHARED + "right plate", "lift", SHARED + "stove", spelling)
    (line,) = describe_long_prompts(mixture(spec, root))
    assert "the ends of 3 of 4 tasks are cut" in line
    assert "; 2 different tasks have the same tokens as another one, such as " in line
    assert "right plate' and 'put the white mug" in line


def test_tasks_are_cut_beside_the_longest_state_and_memory(bare_spec, tmp_path):
    spec = replace(bare_spec, prompt_template="{task} {state}{memory}", prompt_tokens=40)
    root = write_tasks(tmp_path / "data", "a" * 27)
    assert describe_long_prompts(mixture(spec, root)) == [], "with 3 bins of 3 digits there are 40 tokens"
    remembering = replace(spec, memory_tokens=5)
    assert describe_long_prompts(mixture(remembering, root)) == [], "without a memory in the data"
    annotated = annotate(root, tmp_path / "annotated", {"memory": ["m"] * 2})
    (line,) = describe_long_prompts(mixture(remembering, annotated))
    assert "the ends of 1 of 1 tasks may be cut: the longest" in line
    assert "takes 27 tokens, and 22 are left (a state of 3 values and a memory of 5 tokens)" in line


def test_a_prompt_that_a_long_state_may_leave_no_room_for_is_a_warning_before_it_comes_up(dataset_root, bare_spec):
    spec = replace(bare_spec, prompt_template="{task} {state}", prompt_tokens=13)
    lines = {tokens: describe_long_prompts(mixture(replace(spec, prompt_tokens=tokens), dataset_root)) for tokens in (12, 13)}
    assert "the ends of" in lines[13][0]
    assert "tasks may be cut" in lines[13][0]
    (line,) = lines[12]
    assert line == (
        f"{dataset_root}: prompt_tokens is 12, and a prompt takes up to 13 without its task (a state of 3 values): a frame "
        "whose prompt takes more ends the training; name a tokenizer with fewer tokens per word, choose a policy or size with "
        "more prompt_tokens"
    )
    DatasetSamples(open_dataset(dataset_root), replace(spec, prompt_tokens=12), 0).sample(0, 0)


def test_texts_to_learn_that_are_cut_are_counted_with_the_longest_of_them(dataset_root, sole_spec, tmp_path):
    responses = ["reach", "grasp", "ab"] * FRAMES
    features = {"response": responses[:FRAMES], "memory": ["", *["five5"] * (FRAMES - 1)]}
    annotated = annotate(dataset_root, tmp_path / "annotated", features)
    (line,) = describe_unseen_data(mixture(sole_spec, dataset_root, annotated))
    assert line.startswith(
        f"{annotated}: response_tokens is 4, and the ends of 2 of 3 response texts are cut, with what ends them: the longest, "
        "'reach', takes 6 tokens; name a tokenizer with fewer tokens per word, choose a policy or size with more tokens"
    )
    assert describe_unseen_data(mixture(replace(sole_spec, response_tokens=6), annotated)) == []
    ((tokens, mask), *_) = [
        (sample["response_tokens"], sample["response_mask"]) for sample in [mixture(sole_spec, annotated).sample(0, 0)]
    ]
    assert bool(mask.all()), f"{tokens} end in no <eos>"


def test_only_a_part_of_the_episodes_of_a_large_dataset_is_looked_at(bare_spec, tmp_path, monkeypatch):
    monkeypatch.setattr("benchbox.data.samples.texts._LOOKED_AT_EPISODES", 2)
    root = write_dataset(tmp_path / "plain", lengths=(3,) * 9, tasks=("lift",) * 9)
    long = ["too long" if 3 <= frame < 24 else "ab" for frame in range(27)]
    spec = replace(bare_spec, response_tokens=4)
    assert describe_unseen_data(mixture(spec, annotate(root, tmp_path / "middle", {"response": long}))) == []
    monkeypatch.undo()
    (line,) = describe_unseen_data(mixture(spec, tmp_path / "middle"))
    assert "the ends of 1 of 2 response texts are cut" in line


def test_metadata_that_are_cut_or_left_out_are_named(bare_spec, dataset_root, tmp_path):
    texts = {f"metadata.{name}": [name] * FRAMES for name in ("speed", "quality", "mistake")}
    annotated = annotate(dataset_root, tmp_path / "annotated", texts)
    left_out, cut = describe_unseen_data(mixture(replace(bare_spec, metadata=(2, 16)), annotated))
    assert left_out.startswith(f"{annotated}: the policy reads 2 fields of metadata, and metadata.mistake is left out; choose")
    assert "a field of metadata has 16 tokens, and the ends of 1 of 1 metadata.quality texts are cut: the longest" in cut
    assert describe_unseen_data(mixture(replace(bare_spec, metadata=(3, 20)), annotated)) == []
