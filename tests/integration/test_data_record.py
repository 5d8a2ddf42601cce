"""Recording in the real simulator, with its scripted experts and its software renderer. Needs the extra `sim`."""

import importlib.util
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.data.writing import recording, simulator
from benchbox.errors import DataError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("metaworld") is None,  # importing it would choose the renderer before benchbox does
    reason="needs the extra sim: pip install -c constraints.txt -e '.[sim]'",
)

CAMERAS = ("corner", "corner2", "topview", "gripperPOV")


ARGUMENTS = ("--env", "metaworld/reach-v3", "--env", "metaworld/door-open-v3", "--episodes", 1, "--size", 32, "--every", 8)


def start_benchbox_data(*arguments, cwd, before=""):
    """Start `benchbox data` in a process of its own; `before` is Python run ahead of it, to take something away."""
    code = f"import sys\n{before}\nfrom benchbox.cli.app import main\nsys.argv[0] = 'benchbox'\nmain()"
    environment = {name: value for name, value in os.environ.items() if name not in {"MUJOCO_GL", "DISPLAY"}}
    command = [sys.executable, "-c", code, "data", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def benchbox_data(*arguments, cwd, before=""):
    """Run `benchbox data` to its end."""
    process = start_benchbox_data(*arguments, cwd=cwd, before=before)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Two tasks, an episode each, all four cameras; the command's output and the dataset's folder."""
    folder = tmp_path_factory.mktemp("recorded")
    done = benchbox_data("record", *ARGUMENTS, "--out", "demos", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder / "demos"


def test_a_recording_is_a_dataset_of_its_tasks_and_cameras(recorded):
    output, root = recorded
    ds = open_dataset(root)
    assert "reach-v3: solved in 6 frames; 1 of 1 episodes, solved in 1 of 1 attempts (100%)" in output
    assert ds.tasks == ("reach", "door open")
    assert ds.cameras == CAMERAS
    assert ds.fps == 10
    assert len(ds.episodes) == 2
    assert sum(file.stat().st_size for file in root.rglob("*")) < 2**20


def test_every_camera_sees_something_of_its_own_that_moves(recorded):
    ds = open_dataset(recorded[1])
    episode = ds.episodes[1]
    start, end = ds[episode.from_index], ds[episode.to_index - 1]
    for camera in CAMERAS:
        image = start[f"observation.images.{camera}"].float()
        assert image.shape == (3, 32, 32)
        assert image.std() > 10, f"{camera} is blank"
        assert (image - end[f"observation.images.{camera}"]).abs().mean() > 2, f"{camera} does not move"
    images = [start[f"observation.images.{camera}"].float() for camera in CAMERAS]
    assert all((images[a] - images[b]).abs().mean() > 10 for a in range(4) for b in range(a))


def test_the_corner_cameras_are_upright(recorded):
    """The wall behind the table is dark grey and above it; the table, brown and below."""
    image = open_dataset(recorded[1])[0]["observation.images.corner"].float()
    red_over_blue = image[0] - image[2]
    assert red_over_blue[20:28, 4:12].mean() > red_over_blue[:6, :12].mean() + 10


def test_states_follow_the_actions(recorded):
    """The recorded actions are those performed: the hand moves in the direction of the action."""
    ds = open_dataset(recorded[1])
    reach = ds.episodes[0]
    states = torch.from_numpy(ds.column("observation.state", 0, reach.to_index))
    actions = torch.from_numpy(ds.column("action", 0, reach.to_index))
    assert actions.abs().max() <= 1
    moved = states[1:, :3] - states[:-1, :3]
    towards = torch.nn.functional.cosine_similarity(moved, actions[:-1, :3], dim=1)
    assert towards.median() > 0.7


def test_inspect_describes_a_recording_and_finds_nothing_wrong(recorded):
    done = benchbox_data("inspect", recorded[1], cwd=recorded[1].parent)
    assert done.returncode == 0, done.stderr
    for text in ("LeRobot v3.0, robot sawyer", "reach (1 episodes); door open (1 episodes)", "10 frames/s", "no problems"):
        assert text in done.stdout


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_killed_recording_says_how_to_finish_it_and_finishes_as_if_it_had_not_been_killed(recorded, tmp_path):
    process = start_benchbox_data("record", *ARGUMENTS, "--out", "demos", cwd=tmp_path)
    assert "reach-v3: solved" in process.stdout.readline()
    process.kill()
    process.communicate()
    refused = benchbox_data("inspect", "demos", cwd=tmp_path)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(
        "error: demos: an unfinished recording; finish it with: benchbox data record --env metaworld/reach-v3"
    )
    other = benchbox_data("record", *ARGUMENTS, "--seed", 1, "--out", "demos", cwd=tmp_path)
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "seed 0, not 1" in other.stderr
    command = shlex.split(line.partition("finish it with: benchbox data ")[2])
    finished = benchbox_data(*command, cwd=tmp_path)
    assert "reach-v3: solved in 6 frames before the interruption" in finished.stdout
    assert contents(tmp_path / "demos") == contents(recorded[1])


def test_an_attempt_does_not_depend_on_those_before_it(tmp_path):
    """A recording that resumes makes its first attempt in a new simulator."""
    recording.record(tmp_path / "two", envs=["metaworld/door-open-v3"], episodes=2, cameras=[], size=32, every=8)
    made = []
    with simulator.Simulator("door-open-v3", [], 32, 8, 0) as second:
        writer = SimpleNamespace(add_frame=lambda frame, task: made.append(frame))
        second.attempt(1, writer)
    dataset = open_dataset(tmp_path / "two")
    episode = dataset.episodes[1]
    states = dataset.column("observation.state", episode.from_index, episode.to_index)
    np.testing.assert_array_equal(states, np.array([frame["observation.state"] for frame in made], dtype=np.float32))


def test_the_same_seed_gives_the_same_demonstration(recorded, tmp_path):
    """Goals and physics are seeded: without cameras, states and actions come out as in the recording with them."""
    recording.record(tmp_path / "again", envs=["metaworld/reach-v3"], episodes=1, cameras=[], size=32, every=8)
    again, before = open_dataset(tmp_path / "again"), open_dataset(recorded[1])
    end = before.episodes[0].to_index
    np.testing.assert_array_equal(again.column("action", 0, end), before.column("action", 0, end))
    recording.record(tmp_path / "other", envs=["metaworld/reach-v3"], episodes=1, cameras=[], size=32, every=8, seed=1)
    assert not np.array_equal(open_dataset(tmp_path / "other").column("action", 0, 1), before.column("action", 0, 1))


def test_episodes_that_do_not_solve_the_task_are_discarded_and_counted(tmp_path):
    """Seed 0's third goal of door open defeats the expert when every action is held for two control steps."""
    attempts = []
    recording.record(
        tmp_path / "doors",
        envs=["metaworld/door-open-v3"],
        episodes=3,
        cameras=[],
        size=32,
        every=2,
        report=attempts.append,
    )
    assert [attempt.solved for attempt in attempts] == [True, True, False, True]
    assert (attempts[-1].saved, attempts[-1].discarded) == (3, 1)
    assert len(open_dataset(tmp_path / "doors").episodes) == 3


def test_an_expert_that_never_solves_its_task_ends_the_recording(tmp_path, monkeypatch):
    class Idle:
        def get_action(self, observation):
            return np.zeros(4)

    real = simulator.import_simulator()
    monkeypatch.setattr(simulator, "import_simulator", lambda: (*real[:2], {"reach-v3": Idle}))
    with pytest.raises(DataError, match="reach-v3: the expert solved 0 of 4 attempts, and 1 are wanted"):
        recording.record(tmp_path / "new", envs=["metaworld/reach-v3"], episodes=1, cameras=[], size=32, every=8)
    assert list(tmp_path.iterdir()) == []


WITHOUT_OSMESA = """
import ctypes
real = ctypes.CDLL.__init__
def load(self, name, *args, **kwargs):
    if "OSMesa" in str(name):
        raise OSError("cannot open shared object file")
    real(self, name, *args, **kwargs)
ctypes.CDLL.__init__ = load
"""


@pytest.mark.parametrize(
    ("arguments", "before", "says"),
    [
        (("--env", "metaworld/reech-v3"), "", "no environment 'reech-v3'; did you mean 'reach-v3'?"),
        (("--env", "reach-v3"), "", "unknown environment 'reach-v3': names are like metaworld/reach-v3"),
        (("--env", "metaworld/reach-v3", "--cameras", "corner,topvew"), "", "no camera 'topvew'; did you mean 'topview'?"),
        (("--env", "metaworld/reach-v3", "--every", "3"), "", "no whole number of frames a second"),
        (("--env", "metaworld/reach-v3", "--size", "33"), "", "even sizes"),
        (("--env", "metaworld/reach-v3"), "sys.modules['metaworld'] = None", "pip install 'benchbox[sim]'"),
        (("--env", "metaworld/reach-v3"), WITHOUT_OSMESA, "install libosmesa6"),
        (("--env", "metaworld/reach-v3"), "import os; os.environ['DISPLAY'] = ':4711'", "set MUJOCO_GL=osmesa"),
    ],
    ids=["environment", "suite", "camera", "rate", "size", "extra", "library", "display"],
)
def test_what_cannot_be_recorded_is_one_line_with_the_remedy(tmp_path, arguments, before, says):
    done = benchbox_data("record", *arguments, "--out", "new", cwd=tmp_path, before=before)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []
