"""A recording that is killed at any moment is unfinished or complete, and continues to the dataset it would have been."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest

from benchbox.data import open_dataset
from benchbox.data.inspection import inspect
from benchbox.data.writing import files, recording
from benchbox.errors import DataError
from tests.support.datasets import draw_index
from tests.support.tiers import in_tiers

SIZE = 16
NEVER = 10**6
UNFINISHED = r"demos: (no such dataset folder|an unfinished recording; finish it with: .*demos)$"
UNSOLVED = {("push-v3", 1), ("pull-v3", 0)}


class DrawnSimulator:
    """Stands in for Meta-World, which is an extra: an attempt is a function of its environment and number."""

    def __init__(self, name, cameras, size, every, seed):
        self.name, self.fps, self._cameras, self._seed = name, 80 // every, cameras, seed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def attempt(self, number, writer):
        rng = np.random.default_rng([self._seed, number, *self.name.encode()])
        length = int(rng.integers(3, 6))
        for _ in range(length):
            frame = {"observation.state": rng.normal(size=4), "action": rng.normal(size=4)}
            frame |= {f"observation.images.{c}": draw_index(int(rng.integers(256)), SIZE, SIZE) for c in self._cameras}
            writer.add_frame(frame, task=self.name.partition("-")[0])
        return length, (self.name, number) not in UNSOLVED


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    monkeypatch.setattr(recording, "Simulator", DrawnSimulator)


def record(root, **changes):
    arguments = {"envs": ["metaworld/push-v3", "metaworld/pull-v3"], "episodes": 2, "cameras": ["corner"], "size": SIZE}
    return recording.record(root, **(arguments | {"every": 8} | changes))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole") / "demos"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "Simulator", DrawnSimulator)
        record(root)
    return root


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def kill_at(root, event):
    """Record in a process of its own that kills itself at one of its moments; return the number of its moments up to then.

    The moments are those at which it opens, renames, makes or removes a file or folder of the recording, and those at which
    it encodes a frame.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        moments = 0

        def count():
            nonlocal moments
            moments += 1
            os.write(sender, b".")
            if moments == event:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(name, arguments):
            if name.partition(".")[0] in ("open", "os", "shutil", "tempfile") and str(root) in str(arguments):
                count()

        add = files.VideoWriter.add
        files.VideoWriter.add = lambda *arguments, **options: (count(), add(*arguments, **options))
        sys.addaudithook(audit)
        try:
            record(root)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(sender)
    with os.fdopen(receiver, "rb") as stream:
        moments = len(stream.read())
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return moments


@pytest.mark.parametrize("every", in_tiers([23, 11], (23).__eq__))
def test_killed_at_any_moment_it_resumes_to_the_same_dataset(uninterrupted, tmp_path, every):
    """Moments at this distance, and every one of the last twelve, in which the dataset appears under its name."""
    total = kill_at(tmp_path / "none" / "demos", NEVER)
    moments = sorted({*range(1, total, every), *range(total - 12, total + 1)})
    is_complete = []
    for moment in moments:
        root = tmp_path / str(moment) / "demos"
        assert kill_at(root, moment) == moment
        is_complete.append((root / "meta/info.json").exists())
        if is_complete[-1]:
            assert len(open_dataset(root).episodes) == 4
        else:
            with pytest.raises(DataError, match=UNFINISHED):
                open_dataset(root)
        record(root)
        assert contents(root) == contents(uninterrupted), moment
        assert [path.name for path in root.parent.iterdir()] == ["demos"]
    assert is_complete == sorted(is_complete)
    assert {True, False} == set(is_complete)


def test_attempts_of_the_killed_process_are_not_made_again(tmp_path):
    attempts = []
    moment = 60
    kill_at(tmp_path / "demos", moment)
    record(tmp_path / "demos", report=attempts.append)
    assert {attempt.stored for attempt in attempts} == {True, False}
    assert [(attempt.env, attempt.solved) for attempt in attempts] == [
        ("push-v3", True),
        ("push-v3", False),
        ("push-v3", True),
        ("pull-v3", False),
        ("pull-v3", True),
        ("pull-v3", True),
    ]


def test_success_rates_are_returned_stored_and_inspected(uninterrupted):
    stored = json.loads((uninterrupted / "meta/benchbox_recording.json").read_text())
    assert stored["tasks"] == [{"env": env, "attempts": 3, "solved": 2} for env in ("push-v3", "pull-v3")]
    facts = inspect(open_dataset(uninterrupted)).facts
    assert facts["expert of push-v3"] == "solved in 2 of 3 attempts (67%)"
    assert [rate.solved for rate in record(uninterrupted)] == [2, 2]  # complete: nothing is recorded again


def test_statistics_are_those_of_all_frames(uninterrupted):
    dataset = open_dataset(uninterrupted)
    states = np.concatenate([dataset.column("observation.state", e.from_index, e.to_index) for e in dataset.episodes])
    np.testing.assert_allclose(dataset.statistics["observation.state"]["q01"], np.quantile(states, 0.01, axis=0), rtol=1e-5)
    image = dataset.statistics["observation.images.corner"]
    assert (image["min"], image["max"], image["count"]) == ([[[0.0]]] * 3, [[[1.0]]] * 3, [len(dataset)])
    assert inspect(dataset).problems == []
    assert [episode.tasks for episode in dataset.episodes] == [("push",)] * 2 + [("pull",)] * 2


@pytest.mark.parametrize("moment", [60, NEVER])
def test_other_arguments_are_refused_in_one_line(tmp_path, moment):
    """An unfinished recording as well as a complete one is left as it is."""
    root = tmp_path / "demos"
    kill_at(root, moment)
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"was recorded with episodes 2, not 3, seed 0, not 1; .* remove") as caught:
        record(root, episodes=3, seed=1)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_where_nothing_was_solved_nothing_is_in_the_way_of_the_other_arguments_that_are_advised(tmp_path, monkeypatch):
    class Hopeless(DrawnSimulator):
        def attempt(self, number, writer):
            return super().attempt(number, writer)[0], False

    monkeypatch.setattr(recording, "Simulator", Hopeless)
    with pytest.raises(DataError, match=r"solved 0 of \d+ attempts, and 1 are wanted; record with another --seed"):
        record(tmp_path / "demos", envs=["metaworld/push-v3"], episodes=1)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_record_into_one_folder(tmp_path, monkeypatch):
    class Meddler(DrawnSimulator):
        def attempt(self, number, writer):
            with pytest.raises(DataError, match="another process is recording into it"):
                record(tmp_path / "demos")
            return super().attempt(number, writer)

    monkeypatch.setattr(recording, "Simulator", Meddler)
    record(tmp_path / "demos")


def test_a_file_system_without_locks_is_not_taken_for_another_recording(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(DataError, match=r"cannot be locked \(No locks available\); record to another file system"):
        record(tmp_path / "demos")


def test_damaged_success_rates_are_one_problem(uninterrupted, tmp_path):
    root = shutil.copytree(uninterrupted, tmp_path / "copy")
    (root / "meta/benchbox_recording.json").write_text('{"tasks": [1]}')
    (problem,) = inspect(open_dataset(root)).problems
    assert problem.startswith(f"{root}/meta/benchbox_recording.json: not the attempts of a recording")
