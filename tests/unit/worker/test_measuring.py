"""Values that a measurement reads from the device once its steps are done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.errors import NonFiniteError
from benchbox.measure.phases import NONE
from benchbox.measure.probe import ProbeResult
from benchbox.session import StepResult
from benchbox.session.build import copy_meta_policy
from benchbox.worker.measuring import _read_finite
from benchbox.worker.step_flops import probed_flops
from benchbox.worker.steps import warm_up
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from benchbox.registry.launch_record import Flops


def norms(*values: float, skipped: tuple[int, ...] = ()) -> list[float]:
    """Read the gradient norms of steps."""
    results = [
        StepResult(torch.tensor(0.0), torch.tensor(value), {}, 1, (), {}, skipped=step in skipped)
        for step, value in enumerate(values)
    ]
    return _read_finite("grad_norm", results, lambda result: result.grad_norm)


def test_values_are_read_as_floats_in_the_order_of_steps() -> None:
    assert norms(2.5, -0.5) == [2.5, -0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_an_error_with_its_step_and_name(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"^step 1: grad_norm is "):
        norms(1.0, value, value)


def test_a_skipped_step_may_have_any_norm_and_no_other_step_may() -> None:
    assert norms(1.0, float("inf"), 2.0, skipped=(1,)) == [1.0, float("inf"), 2.0]
    with pytest.raises(NonFiniteError, match=r"^step 2: grad_norm is nan"):
        norms(1.0, float("inf"), float("nan"), skipped=(1,))


def test_memory_left_by_construction_is_released_before_the_warm_up_so_that_no_measured_step_reserves_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the order of calls is tested: their effect on reserved memory was not measured, since no GPU was at hand."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"synchronize {device}"))
    session = SimpleNamespace(device=torch.device("cuda", 1), step=lambda *_: calls.append("step"))
    reporter = SimpleNamespace(report_progress=lambda: None)
    warm_up(session, iter(()), 2, NONE, reporter)  # type: ignore[arg-type]
    assert calls == ["empty_cache", "step", "step", "synchronize cuda:1"]


def test_the_copy_for_the_formula_of_flops_holds_no_weights() -> None:
    """Also that of a policy that was built on the device itself, whose weights would be counted in its peak."""

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(2, 2)
            self.tied = self.head
            self.register_buffer("steps", torch.zeros(3))

        def work(self, _: Any) -> list[Any]:
            return []

        def parameter_roles(self) -> dict[str, str]:
            return {name: "head" for name, _ in self.named_parameters()}

    policy: Any = Counted()
    copied: Any = copy_meta_policy(tiny_cell(), policy)
    assert {tensor.device.type for tensor in (*copied.parameters(), *copied.buffers())} == {"meta"}
    assert copied.tied is copied.head
    assert [tensor.shape for tensor in copied.parameters()] == [tensor.shape for tensor in policy.parameters()]
    assert {tensor.device.type for tensor in policy.parameters()} == {"cpu"}


def test_a_policy_that_declares_no_cost_has_no_flops_by_formula() -> None:
    policy: Any = torch.nn.Linear(2, 2)
    assert copy_meta_policy(tiny_cell(), policy) is None
    counts: Flops = {"model_flops_per_step": 3, "recomputed_flops_per_step": 0, "reason": None}
    probed = ProbeResult(
        collectives={},
        attention_kernel=None,
        attention_sites={},
        checkpointed_modules=0,
        matmul_dtypes=set(),
        flops=counts,
        memory=None,
        device_name="this cpu",
        micro_batches=[],
    )
    flops, _ = probed_flops(None, probed, [1.0], torch.device("cpu"))
    reason = "the policy declares no cost: it has no method `work`"
    assert flops == counts | {"per_tower": None, "per_tower_reason": reason}
