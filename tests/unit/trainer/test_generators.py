"""Generators continue from the states that a checkpoint keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from benchbox.trainer.checkpoint import state
from benchbox.trainer.checkpoint.generators import generator_states, set_generators

CPU = torch.device("cpu")


def draw() -> list[float]:
    """Return numbers of every generator; a normal one leaves a second of its kind waiting."""
    normal = [random.gauss(0.0, 1.0), float(np.random.randn())]
    return [torch.rand(1).item(), random.random(), float(np.random.rand()), *normal]


@pytest.mark.parametrize("draws_before", [0, 1, 3])
def test_the_next_draws_are_those_after_the_state(draws_before: int) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    for _ in range(draws_before):
        draw()
    states = generator_states(CPU)
    expected = [draw() for _ in range(3)]
    set_generators({kind: state.clone() for kind, state in states.items()}, CPU)
    assert [draw() for _ in range(3)] == expected


def test_more_ranks_than_were_saved_repeat_their_generators_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = dict.fromkeys(("rng/0/cpu", "rng/1/cpu", "weights/a"))
    keys = []
    for rank in range(4):
        monkeypatch.setattr(state, "rank", lambda rank=rank: rank)
        keys.append(state.generator_keys(saved, CPU))
    assert keys == [{"cpu": "rng/0/cpu"}, {"cpu": "rng/1/cpu"}] * 2
