"""Values that a measurement reads from the device once its steps are done."""

from __future__ import annotations

import pytest
import torch

from benchbox.errors import NonFiniteError
from benchbox.worker.measuring import _read_finite, _tower_flops


def test_values_are_read_as_floats_in_the_order_of_steps() -> None:
    assert _read_finite("loss", [torch.tensor(2.5), torch.tensor(-0.5)]) == [2.5, -0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_an_error_with_its_step_and_name(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"^step 1: grad_norm is "):
        _read_finite("grad_norm", [torch.tensor(1.0), torch.tensor(value), torch.tensor(value)])


def test_a_policy_that_declares_no_cost_has_no_flops_by_formula() -> None:
    assert _tower_flops(torch.nn.Linear(2, 2), [], torch.device("cpu")) is None
