"""Parts of a step that all backends share."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.backends import base
from benchbox.backends.replicated import Ddp, Single

if TYPE_CHECKING:
    from benchbox.backends.base import Backend


@pytest.mark.parametrize(("norm", "judged"), [(2.5, 2.5), (math.nan, math.inf), (math.inf, math.inf), (-1.0, math.inf)])
def test_a_norm_that_is_not_finite_is_judged_as_infinite(norm: float, judged: float) -> None:
    """No comparison with NaN is true, so that a guard against spikes would let it pass; -1 is DeepSpeed's number for it."""
    backend = Single()
    backend.grad_norm = torch.tensor(norm)
    assert backend.norm_of_step() == judged


def test_a_mean_over_ranks_is_their_sum_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 4, all_reduce=lambda value: value.add_(9))
    monkeypatch.setattr(base, "dist", ranks)
    assert Single().mean_over_ranks(torch.tensor(3.0)).item() == 3


@pytest.mark.parametrize(("backend", "skips"), [(Single(), True), (Ddp(), False)])
def test_a_backward_pass_skips_work_where_gradients_of_frozen_parameters_are_not_computed(
    backend: Backend, skips: bool
) -> None:
    assert not backend.skips_frozen_work
    backend._frozen = [nn.Parameter(torch.ones(1))]
    assert backend.skips_frozen_work is skips
