"""The data that a checkpoint is validated on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from benchbox.data.loading.loader import open_samples
from benchbox.data.sample import sample_path
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.trainer.checkpoint_validation import open_validated_samples
from tests.support.datasets import write_robot

if TYPE_CHECKING:
    from pathlib import Path


def test_fast_tokens_are_those_that_the_policy_has_learned_whatever_is_validated(tmp_path: Path) -> None:
    """A tokenizer that is trained on other frames gives the same ids to other actions."""
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(sample_path())),), validation=0.3)
    trained = Cell(policy="pi05", size="tiny", backend="single", world_size=1, batch=2, data=data)
    with torch.device("meta"):
        spec = build_policy("pi05", "tiny", Axes(cams=2)).batch_spec()
    learned = open_samples(data, spec, trained.seed).fast
    other = write_robot(tmp_path / "robot", cameras={"top": (16, 16)}, lengths=(9, 9))
    for validated in (replace(data, validation=0.0), replace(data, datasets=(DatasetSpec(path=str(other)),))):
        samples, apart = open_validated_samples(trained, validated, spec), open_samples(validated, spec, trained.seed)
        chunks = [part.chunk(index) for part in samples._parts for index in range(0, len(part), 3)]
        expected = [learned.encode(chunk) for chunk in chunks]
        assert [part.fast.encode(chunk) for part in samples._parts for chunk in chunks] == expected
        assert [apart.fast.encode(chunk) for chunk in chunks] != expected
