"""Estimates of modules that were not written for benchbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchbox.errors import UnsupportedError
from benchbox.estimation import Estimator
from benchbox.plan import plan
from benchbox.spec import load_matrix
from tests.support.foreign import FOLDER, foreign_cell

MATRIX = load_matrix(Path(__file__).parents[3] / "matrices" / "any_policy.yaml")
CELLS = plan(MATRIX).cells


@pytest.mark.parametrize("policy", dict.fromkeys(cell.policy for cell in CELLS))
def test_every_cell_of_a_model_of_transformers_is_estimated(policy):
    """On all backends, with and without checkpointing, whether the policy generates its samples or declares their form."""
    estimator = Estimator(MATRIX.policy_dirs)
    estimates = {cell: estimator.estimate(cell) for cell in CELLS if cell.policy == policy}
    assert len({cell.backend for cell in estimates}) == 9
    assert len({estimate.total_numel for estimate in estimates.values()}) == 1
    for cell, estimate in estimates.items():
        assert sum(estimate.components.values()) == estimate.peak_bytes > 0, cell.backend
        assert bool(estimate.collectives) == (cell.world_size > 1), cell.backend


def test_parameter_groups_are_those_of_a_module_whose_names_begin_with_module():
    """DeepSpeed gathers each group by itself, so a parameter without its group could not be counted."""
    estimate = Estimator([FOLDER]).estimate(foreign_cell(backend="zero2", world_size=2))
    assert estimate.collectives["all_gather"]["count"] == 4  # backbone and head, with and without decay


SCALED = """\
import benchbox
import torch
from torch import nn

class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale

def build(preset, axes):
    return benchbox.adapt(Scaled(), loss=lambda output: output.square().mean(), batch=lambda size, seed: torch.ones(size, 4))
"""


def test_a_policy_with_scalar_parameters_has_estimates_of_the_backends_that_take_them(tmp_path):
    (tmp_path / "scaled").mkdir()
    (tmp_path / "scaled" / "policy.py").write_text(SCALED)
    (tmp_path / "scaled" / "presets.yaml").write_text("tiny: {}\n")
    estimator = Estimator([tmp_path])
    assert estimator.estimate(foreign_cell(policy="scaled", backend="ddp", world_size=2)).total_numel == 4 * 2 + 2 + 1
    for backend in ("fsdp1_full", "fsdp2", "zero2", "zero3"):
        with pytest.raises(UnsupportedError, match=f"scaled has scalar parameters, which {backend} cannot shard"):
            estimator.estimate(foreign_cell(policy="scaled", backend=backend, world_size=2))
