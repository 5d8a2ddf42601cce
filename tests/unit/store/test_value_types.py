"""A value of another type than its key has: refused where it is read, in one line that names the file and the key."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchbox.errors import EXIT_USAGE, RecordError
from benchbox.registry.phases import STEP_PARTS
from benchbox.store.baseline import read_baseline
from benchbox.store.benchmarks import BASELINE_KIND, read_benchmarks
from benchbox.store.json_types import type_problem
from benchbox.store.run import RunStore
from tests.support.example_run import CELL, example_record, example_run
from tests.support.host_states import busy_state

REMOVED = object()
AS_MANY = "values of as many ranks as in step_time_s.per_rank"
WALK = {"cells": [], "at_most": None, "predicted_batch": None, "prediction_reason": None, "fastest": None}
VALUE = {"value": 0.5, "low": 0.4, "high": 0.6, "launches": 3}  # of a baseline


def change(value: Any, path: str, item: object) -> Any:
    """Replace or remove the item at a path of keys and indices."""
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    parent = value
    for key in parents:
        parent = parent[key]
    if item is REMOVED:
        del parent[last]
    else:
        parent[last] = item
    return value


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("observed", "ddp", "observed: text, and an object or null is expected"),
        ("observed.settings", [], "observed.settings: a list, and an object is expected"),
        ("observed.shard_numel.1", "1", "observed.shard_numel[1]: text, and a whole number or null is expected"),
        ("observed.sharding", REMOVED, "observed: missing sharding"),
        ("step_time_s.per_rank.0.2", None, "step_time_s.per_rank[0][2]: null, and a number is expected"),
        ("phases_s.forward", [0.1], "phases_s.forward: a list, and an object is expected"),
        ("memory.worst", 5, "memory.worst: a whole number, and an object is expected"),
        ("memory.worst.rank", True, "memory.worst.rank: true or false, and a whole number or null is expected"),
        ("precision.findings", {}, "precision.findings: an object, and a list is expected"),
        ("precision.census.0.bytes", 0.5, "precision.census[0].bytes: a number, and a whole number is expected"),
        ("collectives.all_reduce.count", "3", "collectives.all_reduce.count: text, and a whole number is expected"),
        ("host.hosts.0.load_average", 2.5, "host.hosts[0].load_average: a number, and an object or null is expected"),
        ("loss", 0.5, "loss: a number, and a list or null is expected"),
        ("environment", "", "environment: text, and an object or null is expected"),
        ("environment.threads", [2], "environment.threads: a list, and a whole number is expected"),
        ("environment.variables", "1", "environment.variables: text, and an object is expected"),
        ("environment.git", {}, "environment.git: missing commit, dirty"),
        ("cell", "ddp", "cell: text, and an object is expected"),
        ("cell.batch", "2", "cell.batch: text, and a whole number is expected"),
        ("started_at", 0, "started_at: a whole number, and text is expected"),
        ("step_time_s.per_rank", [], "step_time_s.per_rank: empty, and values of every rank are expected"),
        ("step_time_s.per_rank.1", [], "step_time_s.per_rank: empty, and values of every rank are expected"),
        ("step_time_s.slowest", [], "step_time_s.slowest: empty, and values of every rank are expected"),
        ("phases_s.forward.per_rank", [], "phases_s.forward.per_rank: empty, and values of every rank are expected"),
        ("phases_s.forward.per_rank.1", [], "phases_s.forward.per_rank: empty, and values of every rank are expected"),
        ("memory.per_rank", [], "memory.per_rank: empty, and values of every rank are expected"),
        ("phases_s.forward.per_rank", [[0.1]], f"phases_s.forward.per_rank: {AS_MANY} are expected"),
        ("step_split_s.compute.per_rank", [[0.1]], f"step_split_s.compute.per_rank: {AS_MANY} are expected"),
        *(
            (key, value, f"{key.removesuffix('.0')}: a number above zero is expected")
            for key in ("throughput.global_samples_per_s", "step_time_s.slowest.0")
            for value in (0, -1.5, math.nan, math.inf, 10**400)
        ),
    ],
)
def test_a_record_with_a_wrong_value_is_refused_with_its_file_and_key(tmp_path, path, value, problem):
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    split = {part: {"per_rank": [[0.1] * 4] * 2} for part in STEP_PARTS}
    file = store.write_record({**example_record(), "host": busy_state(), "step_split_s": split})
    file.write_text(json.dumps(change(json.loads(file.read_text()), path, value)))
    with pytest.raises(RecordError) as raised:
        list(store.records())
    assert str(raised.value) == f"{file}: {problem}; delete it and run again"
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("cells.0.cell", "ddp", "cells[0].cell: text, and an object is expected"),
        ("skipped", 0, "skipped: a whole number, and a list is expected"),
        ("thresholds.0", "ok", "thresholds[0]: text, and an object is expected"),
        ("matrix", None, "matrix: null, and an object is expected"),
        ("cells.0.cell.backend", REMOVED, "cells[0].cell: missing backend"),
        ("measure.warmup_steps", REMOVED, "measure: missing warmup_steps"),
        ("walks", [WALK], "ValueError: a walk without batches"),
        ("walks", [WALK | {"cells": ["0a1b"]}], "ValueError: a walk with the cell 0a1b, which is not planned"),
        ("sequential", {"looks": [], "resolution": 0.02}, "ValueError: sequential without looks"),
    ],
)
def test_a_plan_with_a_wrong_value_is_refused_with_its_file_and_key(tmp_path, path, value, problem):
    store = RunStore(tmp_path)
    store.write_run(example_run([CELL]))
    file = tmp_path / "run.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()), path, value)))
    with pytest.raises(RecordError) as raised:
        store.run()
    assert str(raised.value) == f"{file}: not what benchbox writes ({problem})"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            {"cells": {"abc": {"cell": {}, "values": {"step_time_s": {**VALUE, "value": "fast"}}}}},
            "cells.abc.values.step_time_s.value: text, and a number is expected",
        ),
        (
            {"cells": {"abc": {"cell": {}, "values": {"step_time_s": {**VALUE, "by_launch": {"x": 1.0}}}}}},
            "cells.abc.values.step_time_s.by_launch.x: no number of a launch",
        ),
        ({"environment": {"torch": 2.13}}, "environment.torch: a number, and text is expected"),
    ],
)
def test_a_baseline_with_a_wrong_value_is_refused_with_its_file_and_key(tmp_path, content, problem):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"schema_version": 1} | content))
    with pytest.raises(RecordError) as raised:
        read_baseline(file)
    assert str(raised.value) == f"{file}: not a baseline ({problem})"


def benchmarks_with(ratio: dict[str, Any]) -> dict[str, Any]:
    ratio = {"test": "t.py::a", "name": "r", "better": "lower", "values": [1.0], "goal": None, "rounds": []} | ratio
    return {"kind": BASELINE_KIND, "machine": "m", "commit": None, "started_at": ["t"], "ratios": [ratio]}


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("run.json", {"cells": [], "added_later": 1}, lambda file: RunStore(file.parent).run()),
        ("baseline.json", {"cells": {}, "added_later": 1}, read_baseline),
        ("perf.json", benchmarks_with({"added_later": 1}), read_benchmarks),
    ],
)
def test_a_key_that_this_version_does_not_know_is_of_a_newer_one(tmp_path, name, content, read):
    file = tmp_path / name
    file.write_text(json.dumps({"schema_version": 1} | content))
    with pytest.raises(RecordError) as raised:
        read(file)
    message = "has the key 'added_later', which this benchbox does not know: written by a newer benchbox; upgrade this one"
    assert str(raised.value) == f"{file}: {message}"


@pytest.mark.parametrize(("value", "declared"), [(1, float), ((1, 2), list[int]), ({"a": None}, dict[str, int | None])])
def test_a_whole_number_is_a_number_and_a_tuple_a_list(value, declared):
    """Both become so when they are written and read."""
    assert type_problem(value, declared) is None
