"""Checks of the texts of datasets before a training: targets that are missing, and tasks that are cut."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.data import open_dataset
from benchbox.data.samples.mixture import MixtureSamples, select_datasets
from benchbox.data.samples.synthetic import SyntheticSamples
from benchbox.data.samples.training_texts import check_targets, describe_long_prompts
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
