"""Sides that do not train the same have no times to compare."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.peers.equality import UnequalSidesError, check_hyperparameters, check_losses

PUBLISHED = json.loads((Path(__file__).parents[2] / "reports/peers/peers.json").read_text())


@pytest.mark.parametrize("result", PUBLISHED, ids=lambda result: result["peer"])
def test_the_published_sides_train_the_same(result):
    check_hyperparameters(result["sides"])
    check_losses(result["sides"])


@pytest.fixture
def sides():
    return copy.deepcopy(PUBLISHED[0]["sides"])


def test_another_hyperparameter_is_named_with_its_side(sides):
    sides[-1]["optim"]["weight_decay"] = 0.01
    with pytest.raises(UnequalSidesError, match=r"lerobot .*, eager compiled with .*'weight_decay': 0\.01"):
        check_hyperparameters(sides)


def test_a_first_loss_may_differ_by_rounding_only(sides):
    sides[2]["losses"][0] *= 1 + 1e-6
    check_losses(sides)
    sides[2]["losses"][0] *= 1 + 1e-3
    with pytest.raises(UnequalSidesError, match=r"^step 0: the loss of benchbox, sdpa compiled is "):
        check_losses(sides)


@pytest.mark.parametrize("loss", [2.0, float("nan")])
def test_a_side_whose_later_loss_differs_trains_otherwise(sides, loss):
    sides[-2]["turns"][-1]["losses"][-1] *= loss
    with pytest.raises(UnequalSidesError, match=r"^step \d\d: the loss of lerobot"):
        check_losses(sides)


def test_a_side_that_took_fewer_steps_is_not_compared(sides):
    missing = len(sides[1]["turns"].pop()["losses"])
    steps = 1 + sum(len(turn["losses"]) for turn in sides[0]["turns"])
    with pytest.raises(UnequalSidesError, match=f"benchbox, sdpa took {steps - missing} steps, and benchbox, eager {steps}"):
        check_losses(sides)
