"""The annotations of LeRobot 0.6 are read as the texts in force at a frame."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from benchbox.data import open_dataset
from benchbox.data.inspection import inspect
from benchbox.data.samples.windows import DatasetSamples
from benchbox.data.writing.convert import convert
from benchbox.errors import DataError
from tests.support.datasets import add_language, annotate


def row(style, time_s, content, role="assistant"):
    return {"role": role, "content": content, "style": style, "timestamp": time_s, "camera": None, "tool_calls": None}


def event(style, content):
    return {"role": "user", "content": content, "style": style, "camera": None, "tool_calls": None}


FIRST = [  # not in the order of time
    row("subtask", 0.7, "grasp"),  # 0.7 is above the float32 of frame 7
    row("subtask", 0.0, "reach"),
    row("plan", 0.0, "reach, then grasp"),
    row("task_aug", 0.0, "shove it", "user"),
    row("task_aug", 0.0, "push it", "user"),
    row("memory", 0.5, "the block was reached"),
]
PERSISTENT = [FIRST, [], [row("subtask", 1.0, "lift")]]
EVENTS = {3: [event("interjection", "stop"), event("vqa", "what is it?")], 20: [event("vqa", "where?")]}


@pytest.fixture(scope="module")
def root(dataset_root, tmp_path_factory):
    return add_language(dataset_root, tmp_path_factory.mktemp("language") / "annotated", PERSISTENT, EVENTS)


def test_the_response_is_the_subtask_in_force_and_the_memory_the_one_in_force(root):
    dataset = open_dataset(root)
    responses = [dataset.text("response", frame) for frame in range(34)]
    assert responses == ["reach"] * 7 + ["grasp"] * 6 + [""] * 11 + ["lift"] * 10
    memories = [dataset.text("memory", frame) for frame in range(34)]
    assert memories == [""] * 5 + ["the block was reached"] * 8 + [""] * 21


def test_a_subtask_ends_where_the_next_begins_or_with_the_episode(root):
    dataset = open_dataset(root)
    assert [dataset.subtask_end(frame) for frame in (0, 6, 7, 12, 25)] == [6, 6, 12, 12, 33]


def test_a_policy_reads_them_as_response_memory_and_subgoal(root, full_spec):
    spec = replace(full_spec, image_size=(32, 48), response_tokens=24, memory_tokens=24)
    samples = DatasetSamples(open_dataset(root), spec, seed=0)
    sample, other = samples.sample(0, 6), samples.sample(0, 14)
    for name, text in (("response", b"reach"), ("memory", b"the block was reached")):
        assert bytes((sample[f"{name}_tokens"][: len(text)] - 3).tolist()) == text
        assert not other[f"{name}_mask"].any()
    assert sample["subgoal_mask"].all()
    assert not other["subgoal_mask"].any()


def test_a_text_feature_of_that_name_is_preferred(root, tmp_path):
    dataset = open_dataset(annotate(root, tmp_path / "both", {"response": ["say it"] * 34}))
    assert dataset.text("response", 0) == "say it"
    assert dataset.text("memory", 5) == "the block was reached"


def test_the_inspection_counts_annotations_by_style(root):
    inspection = inspect(open_dataset(root))
    assert inspection.problems == []
    assert inspection.facts["language_persistent"] == "1 memory, 1 plan, 3 subtask, 2 task_aug"
    assert inspection.facts["language_events"] == "1 interjection, 2 vqa"


def test_a_dataset_of_v21_has_none_of_them_and_the_conversion_says_so(root, tmp_path):
    conversion = convert(root, tmp_path / "v21", "v2.1")
    assert conversion.left_out == ("language_persistent", "language_events")
    dataset = open_dataset(tmp_path / "v21")
    assert not {"language_persistent", "language_events"} & dataset.features.keys()
    assert "language_persistent" not in pq.read_schema(dataset.episodes[0].data_file).names
    assert dataset.text("response", 0) == ""
    assert convert(tmp_path / "v21", tmp_path / "v30", "v3.0").left_out == ()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [row("subtask", 0.0, "reach"), row("subtask", 0.0, "grasp")],
            "row 13, .*two annotations .* begin at 0 s",
        ),
        ([row("subtask", float("nan"), "reach")], "row 13, language_persistent: annotation 0 has the timestamp nan"),
    ],
)
def test_annotations_that_contradict_one_another_are_one_line_with_the_row(dataset_root, tmp_path, rows, says):
    dataset = open_dataset(add_language(dataset_root, tmp_path / "damaged", [FIRST, rows, []], {}))
    assert dataset.text("response", 3) == "reach"
    with pytest.raises(DataError, match=says):
        dataset.text("response", 13)
    assert any(problem.startswith(str(dataset.root)) for problem in inspect(dataset).problems)
