"""Evaluation leaves modes and generators as they are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from benchbox.trainer.evaluation import evaluating
from tests.support.small_session import SmallSession


def draws() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.rand())


def begin() -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def test_generators_are_those_of_the_evaluation_inside_and_untouched_outside() -> None:
    session = SmallSession()
    begin()
    expected = [draws() for _ in range(3)]
    begin()
    actual, inside = [], []
    for seed in (7, 7, 8):
        actual.append(draws())
        with evaluating(session, seed):
            inside.append(draws())
    assert actual == expected
    assert inside[0] == inside[1]
    assert all(one != another for one, another in zip(inside[1], inside[2], strict=True)), "each of them is seeded"


def test_modules_return_to_the_mode_that_each_of_them_had() -> None:
    session = SmallSession()
    session.model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)), nn.Linear(2, 2))
    session.model[1].eval()
    before = [module.training for module in session.model.modules()]
    assert before == [True, True, False, False, True]
    with evaluating(session, 0):
        assert not any(module.training for module in session.model.modules())
    assert [module.training for module in session.model.modules()] == before
    with pytest.raises(ValueError, match="damaged"), evaluating(session, 0):
        raise ValueError("damaged")
    assert [module.training for module in session.model.modules()] == before
