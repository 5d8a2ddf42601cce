"""Estimates of modules that were not written for benchbox."""

from __future__ import annotations

from pathlib import Path

import pytest

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
