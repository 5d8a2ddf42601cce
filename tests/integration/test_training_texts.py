"""Lines about the texts of its data that a training prints before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.commands import run_in_process
from tests.support.datasets import write_dataset, write_robot

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.ranks

TRAINING = """
name: t
policy: {policy}
size: tiny
data: {data}
backend: ddp
world_size: 2
batch: 1
steps: 2
log_every: 1
checkpoint: {{every: 0}}
"""


def test_a_training_warns_once_of_tasks_that_are_cut_and_of_steps_that_end_in_the_warm_up(tmp_path: Path) -> None:
    root, config = write_dataset(tmp_path / "data", tasks=("open the drawer" * 4,) * 3), tmp_path / "t.yaml"
    config.write_text(TRAINING.format(policy="pi0", data=f"{{lerobot: {root}}}"))
    result = run_in_process("train", config, "--out", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"warning: {root}: prompt_tokens is 48, and the ends of 1 of 1 tasks are cut: ")
    assert result.stderr.count("\n") == 1
    note = "note: the training ends in the warm-up: steps is 2 and optim.warmup_steps is 1000, "
    assert result.stdout.index(note) < result.stdout.index("step 1/2")


def test_a_training_warns_of_a_dataset_that_it_does_not_see(tmp_path: Path) -> None:
    first, second, config = tmp_path / "first", tmp_path / "second", tmp_path / "t.yaml"
    write_robot(first, cameras={"top": (16, 16), "wrist": (16, 16)})
    write_robot(second, cameras={"image_0": (16, 16)})
    mixture = f"{{mixture: [{{lerobot: {first}}}, {{lerobot: {second}}}]}}"
    config.write_text(TRAINING.format(policy="pi0", data=mixture) + "cams: 2\n")
    for options in ((), ("--dry-run",)):
        result = run_in_process("train", config, "--out", tmp_path / "out", *options)
        assert result.returncode == 0, result.stderr
        assert f"{second}: all images of this dataset are black: the policy's cameras are top, wrist" in result.stderr


def test_a_training_of_a_policy_that_could_learn_nothing_ends_before_the_first_step(tmp_path: Path) -> None:
    config = tmp_path / "t.yaml"
    config.write_text(TRAINING.format(policy="pi07_high_level", data="sample"))
    result = run_in_process("train", config, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "the policy learns only the texts memory and response, and sample has none of them" in result.stderr
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
