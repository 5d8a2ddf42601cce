"""Mixtures through the commands: trained by real ranks, measured, and described in records and reports."""

import json
import shutil

import pytest

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.dcp.files import TensorFolder
from tests.support.commands import run_in_process
from tests.support.datasets import write_robot

pytestmark = pytest.mark.ranks

SETUP = """
name: t
policy: {policy}
size: tiny
backend: {backend}
world_size: {ranks}
batch: {batch}
recipe: fp32
seed: 3
optim: {{lr: 1.0e-3, warmup_steps: 1, total_steps: 8}}
data:
  workers: 0
  validation: 0.3
  mode: {mode}
  mixture:
    - {{lerobot: arm, weight: 1, control_mode: joint}}
    - {{lerobot: hand, weight: 3, rename: {{cam_top: top}}, source: bridge, keep: keep.json}}
"""
TRAINING = SETUP + "steps: {steps}\nlog_every: 1\ncheckpoint: {{every: 3, keep: 3}}\n"
RANGES = {"0": [[0, 4]], "1": [[2, 6], [7, 12]]}  # of the hand


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with two datasets of different robots, and ranges of the second."""
    root = tmp_path_factory.mktemp("robots")
    write_robot(root / "arm", cameras={"top": (32, 48), "wrist": (24, 24)}, lengths=(9, 4, 7), level=200, robot="arm")
    hand = {"cameras": {"cam_top": (40, 40)}, "state": 5, "action": 6, "fps": 30, "scale": 10.0, "robot": "hand"}
    write_robot(root / "hand", lengths=(5, 12), level=90, **hand)
    (root / "keep.json").write_text(json.dumps(RANGES))
    return root


def benchbox(folder, *arguments):
    return run_in_process(*arguments, cwd=folder)


def train(folder, name, *more, policy="pi0", mode="policy", backend="single", ranks=1, steps=3):
    file = folder / f"{name}.yaml"
    file.write_text(TRAINING.format(policy=policy, mode=mode, backend=backend, ranks=ranks, batch=4 // ranks, steps=steps))
    return benchbox(folder, "train", str(file), "--out", name, *more)


def losses(folder, name):
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def one_rank(folder):
    done = train(folder, "one", steps=6)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_drawn_of_each_dataset_is_printed_at_the_start(folder, one_rank):
    arm, hand, *_ = one_rank.splitlines()
    assert arm == "arm: 3 episodes, 20 frames at 10 frames/s; 1 of 3 episodes for validation; 25.0% of drawn samples"
    assert hand == (
        "hand: 2 episodes, 17 frames at 30 frames/s; keep.json keeps 13 of 17 frames in 2 of 2 episodes; "
        "1 of 2 episodes for validation; 75.0% of drawn samples"
    )


def test_two_ranks_train_on_a_mixture_as_one_does(folder, one_rank):
    done = train(folder, "two", backend="ddp", ranks=2, steps=6)
    assert done.returncode == 0, done.stderr
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=1e-5)
    assert len(set(losses(folder, "one"))) == 6


def test_the_folder_of_a_training_describes_its_data(folder, one_rank):
    data = json.loads((folder / "one/data.json").read_text())
    assert (data["kind"], data["mode"], data["validation"], data["cameras"]) == ("lerobot", "policy", 0.3, ["top"])
    arm, hand = data["datasets"]
    assert [dataset["fps"] for dataset in (arm, hand)] == [10, 30]
    assert (arm["source"], arm["control_mode"], arm["robot_type"]) == ("arm", "joint", "arm")
    assert (hand["source"], hand["control_mode"], hand["robot_type"]) == ("bridge", "unknown", "hand")
    assert (hand["kept_frames"], hand["kept_episodes"], hand["keep"]) == (13, 2, "keep.json")
    for dataset in (arm, hand):
        assert dataset["training_frames"] + dataset["validation_frames"] == dataset["kept_frames"]
        assert dataset["training_episodes"] + dataset["validation_episodes"] == dataset["kept_episodes"]
    assert (arm["share"], hand["share"], arm["weight"], hand["weight"]) == (0.25, 0.75, 1, 3)


def test_a_dry_run_counts_the_epochs_of_each_dataset(folder, one_rank):
    """Each has its own where they have weights: 24 samples are 6 of the arm and 18 of the hand."""
    done = train(folder, "dry", "--dry-run", steps=6)
    assert done.returncode == 0, done.stderr
    arm, hand = (dataset["training_frames"] for dataset in json.loads((folder / "one/data.json").read_text())["datasets"])
    assert f"\ndata: arm, hand, {arm + hand} samples, drawn by weight; " in done.stdout
    assert f"\n  arm: {arm} samples, 25.0% of those drawn, {6 / arm:.3g} epochs\n" in done.stdout
    assert f"\n  hand: {hand} samples, 75.0% of those drawn, {18 / hand:.3g} epochs\n" in done.stdout


def test_a_training_on_a_mixture_resumes_and_its_checkpoint_has_the_statistics_of_both(folder, one_rank):
    """The training of six steps, as if it had ended after three."""
    halves = shutil.copytree(folder / "one", folder / "halves", symlinks=True)
    shutil.rmtree(halves / "checkpoints/step-00000006")
    metrics = halves / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    key = "buffers/action_normaliser.offset"
    offset = TensorFolder(folder / "halves/checkpoints/step-00000003/tensors").read([key])[key]
    means = [open_dataset(folder / name).statistics["action"]["mean"] for name in ("arm", "hand")]
    assert offset.shape[0] == 2
    for row, mean in zip(offset, means, strict=True):
        assert row[: len(mean)].tolist() == pytest.approx(mean, rel=1e-5)
    done = train(folder, "halves", "--resume", steps=6)
    assert done.returncode == 0, done.stderr
    assert losses(folder, "halves") == losses(folder, "one")


def test_a_checkpoint_of_another_number_of_datasets_is_one_line(folder, one_rank):
    file = folder / "one.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("    - {lerobot: hand")] + text[text.index("steps: 6") :])
    done = benchbox(folder, "train", file, "--out", "one", "--resume")
    file.write_text(text)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "error: one/checkpoints/step-00000006: another configuration: data is 2 dataset(s) there and 1 dataset(s) here"
    )


def test_a_measurement_records_what_was_drawn_of_each_dataset_and_the_report_shows_it(folder):
    file = folder / "m.yaml"
    measure = "measure: {warmup_steps: 1, steps: 4, launches: 1}\n"
    file.write_text(SETUP.format(policy="cosmos_droid", mode="joint", backend="ddp", ranks=2, batch=2) + measure)
    done = benchbox(folder, "run", str(file), "--out", "measured")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "measured/cells").glob("*/launch-1.json")
    record = json.loads(path.read_text())
    data = record["data"]
    assert data["mode"] == "joint"
    drawn = [dataset["drawn"] for dataset in data["datasets"]]
    assert sum(drawn) == (1 + 4) * 2 * 2
    assert min(drawn) > 0
    assert [dataset["path"] for dataset in record["config"]["data"]["datasets"]] == ["arm", "hand"]
    report = (folder / "measured/report.html").read_text()
    assert "mode joint" in report
    assert f"{drawn[0] / sum(drawn):.1%} of the drawn samples" in report
    assert "13 frames in 2 episodes kept" in report


def test_inspecting_with_a_keep_file_counts_what_it_keeps(folder):
    done = benchbox(folder, "data", "inspect", "hand", "--keep", "keep.json")
    assert done.returncode == 0, done.stdout
    assert "kept" in done.stdout
    assert "keep.json keeps 13 of 17 frames in 2 of 2 episodes\n" in done.stdout
    done = benchbox(folder, "data", "inspect", "arm", "--keep", "keep.json")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: keep.json, episode '1', range 0: stop is 6, and episode 1 has 4 frames",
        "error: keep.json, episode '1', range 1: stop is 12, and episode 1 has 4 frames",
    ]


def test_a_wrong_keep_file_ends_a_training_before_any_rank_starts(folder):
    (folder / "wrong.json").write_text('{"9": [[0, 1]]}')
    file = folder / "wrong.yaml"
    text = TRAINING.format(policy="pi0", mode="policy", backend="single", ranks=1, batch=4, steps=3)
    file.write_text(text.replace("keep.json", "wrong.json"))
    done = benchbox(folder, "train", file, "--out", "wrong")
    assert (done.returncode, done.stderr) == (2, "error: wrong.json, episode '9', range 0: the dataset has no episode 9\n")
    assert not (folder / "wrong").exists()
