"""`benchbox train --dry-run` checks a training and prints its plan without starting a rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.train import load_train
from tests.support.datasets import write_dataset, write_robot
from tests.support.saved_checkpoints import save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

TRAINING = """\
name: trial
policy: pi05
size: tiny
backend: fsdp2
world_size: 2
batch: 4
steps: 40
optim:
  lr: 1.0e-3
  schedule: wsd
  warmup_steps: 4
  total_steps: 40
  freeze_backbone_steps: 10
  ema_decay: 0.999
  groups:
    - {match: "model.vision.*", weight_decay: 0.2, betas: [0.8, 0.9]}
"""
VALIDATION = """\
data: {validation: 0.5}
validation: {every: 5, weights: averages}
checkpoint: {every: 10, keep: 3, keep_best: {metric: flow, count: 2}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trial.yaml"
    path.write_text(text)
    return path


def test_a_dry_run_prints_the_plan_the_groups_and_the_schedule_and_trains_nothing(benchbox, tmp_path: Path) -> None:
    config, drawing = write(tmp_path, TRAINING + VALIDATION), tmp_path / "rates.svg"
    result = benchbox("train", config, "--dry-run", "--figure", drawing)
    assert (result.returncode, result.stderr) == (0, "")
    assert "40 steps of 4 samples x 1 micro-steps x 2 ranks = 320 samples\n" in result.stdout
    assert re.search(r"data: sample, \d+ samples, \d\.\d+ epochs", result.stdout)
    assert "\ncheckpoints: every 10 steps and at the end; the newest 3 are kept, and the 2 of min flow\n" in result.stdout
    assert "\nvalidation of the averages: every 5 steps and at the end\n" in result.stdout
    assert re.search(r"^model\.vision\.\*: backbone, decayed +\d+ .* 0\.2 +0\.8 0\.9 ", result.stdout, re.MULTILINE)
    sums = re.search(r"^all +(\d+) +([\d,]+) +(.*)$", result.stdout, re.MULTILINE)
    parameters = [p for p in build_policy("pi05", "tiny", Axes()).parameters() if p.requires_grad]
    elements = sum(parameter.numel() for parameter in parameters)
    assert (int(sums[1]), int(sums[2].replace(",", ""))) == (len(parameters), elements)
    kib, _mib = elements / 2**10, elements / 2**20
    weights, masters, moments, averages = re.findall(r"([\d.]+ \w+)", sums[3])
    assert weights == f"{2 * kib:.0f} KiB"
    assert (masters, moments, averages) == (
        f"{4 * kib / 1024:.2f} MiB",
        f"{8 * kib / 1024:.2f} MiB",
        f"{4 * kib / 1024:.2f} MiB",
    )
    backbone, head = re.findall(r"\|(.*)\|  (\S+) \.\. 1\.00e-03 \.\. \S+$", result.stdout, re.MULTILINE)
    assert (backbone[0][:10], backbone[1]) == (" " * 10, "0.00e+00")
    assert (head[0][:4].strip() != "", head[1]) == (True, "2.00e-04")
    assert drawing.read_text().count("stroke-width: 1.5") == 4, "two curves and their keys in the legend"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.svg", "trial.yaml"]


def test_what_only_the_policy_shows_is_wrong_at_its_line(benchbox, tmp_path: Path) -> None:
    config = write(tmp_path, TRAINING + '    - {match: "model.visoin.*", lr: 0.0}\n')
    result = benchbox("train", config, "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    message = "'model.visoin.*' matches no trainable parameter; did you mean 'model.vision.*'?"
    assert result.stderr == f"error: {config}:17:15: {message}\n"


def test_a_dry_run_says_what_is_frozen_what_happens_to_spikes_and_that_nothing_is_saved(benchbox, tmp_path: Path) -> None:
    text = TRAINING.partition("optim:")[0] + (
        "data: synthetic\nfreeze: freeze_vision\ncheckpoint: {every: 0}\n"
        "optim: {spike: {factor: 4.0, window: 20, action: skip}}\n"
    )
    result = benchbox("train", write(tmp_path, text), "--dry-run")
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^data: synthetic, generated without end; ", result.stdout, re.MULTILINE)
    assert "\ngradient norms above 4 times the median of 20: skip\n" in result.stdout
    assert "\ncheckpoints: none; checkpoint.every is 0\n" in result.stdout
    (frozen,) = re.findall(r"^([\d,]+) elements never train$", result.stdout, re.MULTILINE)
    (trained,) = re.findall(r"^all +\d+ +([\d,]+) ", result.stdout, re.MULTILINE)
    elements = sum(parameter.numel() for parameter in build_policy("pi05", "tiny", Axes()).parameters())
    assert int(frozen.replace(",", "")) == elements - int(trained.replace(",", "")) > 0
    assert "validation" not in result.stdout


def test_a_policy_that_could_learn_nothing_from_the_data_is_refused_at_their_line(benchbox, tmp_path: Path) -> None:
    text = TRAINING.partition("optim:")[0].replace("pi05", "pi07_high_level") + "data: sample\n"
    config = write(tmp_path, text)
    result = benchbox("train", config, "--dry-run")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {config}:8:7: the policy learns only the texts memory and response, and sample has none of them: every loss "
        "would be 0; add such a text feature to the dataset, or choose another policy\n"
    )


def test_a_prompt_that_may_not_fit_is_a_warning_though_that_of_the_first_sample_fits(benchbox, tmp_path: Path) -> None:
    robot = write_robot(tmp_path / "robot", cameras={"front": (16, 20)}, state=28)  # whose bins are 0 at first
    config = write(tmp_path, TRAINING.partition("optim:")[0] + f"data: {{lerobot: {robot}}}\n")
    result = benchbox("train", config, "--dry-run")
    assert result.returncode == 0
    assert result.stderr == (
        f"warning: {robot}: prompt_tokens is 128, and a prompt takes up to 129 without its task (a state of 28 values): a "
        "frame whose prompt takes more ends the training; name a tokenizer with fewer tokens per word, choose a policy or size "
        "with more prompt_tokens\n"
    )


def test_a_dry_run_warns_of_tasks_that_are_cut_and_says_that_the_training_ends_in_the_warm_up(benchbox, tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", tasks=("open the drawer" * 4 + " on the left", "open the drawer" * 4, "lift"))
    text = TRAINING.partition("optim:")[0].replace("pi05", "pi0") + f"data: {{lerobot: {root}}}\n"
    result = benchbox("train", write(tmp_path, text), "--dry-run")
    assert result.returncode == 0
    assert result.stderr.startswith(f"warning: {root}: prompt_tokens is 48, and the ends of 2 of 3 tasks are cut: ")
    assert "2 different tasks have the same tokens as another one" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "\nnote: the training ends in the warm-up: steps is 40 and optim.warmup_steps is 1000" in result.stdout


def test_a_dry_run_of_a_resumed_training_says_after_which_step_it_continues(benchbox, tmp_path: Path) -> None:
    config, out = write(tmp_path, TRAINING), tmp_path / "out"
    first = benchbox("train", config, "--out", out, "--resume", "--dry-run")
    assert f"{out} has no checkpoint: --resume starts anew\n" in first.stdout
    save_checkpoint(out / "checkpoints", 7, load_train(config).cell)
    again = benchbox("train", config, "--out", out, "--resume", "--dry-run")
    assert "resuming after step 7 (" in again.stdout
    assert "resuming" not in benchbox("train", config, "--out", out, "--dry-run").stdout
