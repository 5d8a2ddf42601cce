"""Multi-tensor kernels give the bits of one operation for each tensor; copies and norms use them on accelerators only.

Meta tensors stand in for those of a GPU: neither speed nor values were measured on one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.optim import MasterWeightOptimizer, multi_tensor, norm, scale_gradients, squared_norm
from tests.support.masters import live_model, master_optimizer, set_gradients

CPU, META = torch.device("cpu"), torch.device("meta")


class OperationCounter:
    """Counts the tensor operations that run, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_operation(self, operation: Any, *_: Any) -> None:
        self.counts[str(operation).removeprefix("aten.").split(".")[0]] += 1


def use_multi_tensor(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """Have the path of accelerators, or that of CPUs, chosen for every device."""
    for module in (multi_tensor, norm):
        monkeypatch.setattr(module, "uses_multi_tensor", lambda _: chosen)


def gradients() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(5, 7), torch.randn(11).bfloat16(), torch.zeros(0), torch.randn(3, 3).half(), torch.randn(4100)]


def test_the_path_is_chosen_by_device() -> None:
    assert [multi_tensor.uses_multi_tensor(torch.device(name)) for name in ("cpu", "cuda:1", "meta")] == [False, True, True]


def test_scaling_gives_the_bits_of_scaling_each_gradient_in_its_own_dtype() -> None:
    scaled, coefficient = gradients(), torch.tensor(0.3123456)
    operations = OperationCounter()
    with OperationDispatchMode(operations):
        scale_gradients(scaled, coefficient)
    expected = [gradient * coefficient.to(gradient.dtype) for gradient in gradients()]
    assert all(torch.equal(*pair) for pair in zip(scaled, expected, strict=True))
    assert (operations.counts["_foreach_mul_"], operations.counts["mul_"]) == (3, 0)


def test_norms_have_the_bits_of_the_norm_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {}
    for chosen in (False, True):
        use_multi_tensor(monkeypatch, chosen)
        norms[chosen] = [multi_tensor.vector_norms(group) for group in multi_tensor.group_tensors(gradients())]
    assert [len(group) for group in norms[True]] == [3, 1, 1]
    assert all(torch.equal(*pair) for pair in zip(norms[False], norms[True], strict=True))


def test_the_norm_of_accelerators_is_that_of_cpus_to_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's adds up in rows, so the bits may differ."""
    expected = squared_norm(gradients(), CPU).item()
    use_multi_tensor(monkeypatch, True)
    assert squared_norm(gradients(), CPU).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_masters_step_to_the_same_bits_on_both_paths(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    weights = {}
    for chosen in (False, True):
        use_multi_tensor(monkeypatch, chosen)
        live = live_model()
        optimizer = master_optimizer(live, None, fused=fused)
        operations = OperationCounter()
        for step in range(3):
            set_gradients(live, step)
            with OperationDispatchMode(operations):
                optimizer.step()
        weights[chosen] = [*live.parameters(), *optimizer.masters]
        assert (operations.counts["_foreach_copy_"] > 0) == chosen
    assert all(torch.equal(*pair) for pair in zip(weights[False], weights[True], strict=True))


def test_gradients_on_an_accelerator_take_one_operation_for_each_dtype() -> None:
    on_device = [torch.empty(5, dtype=dtype, device=META) for dtype in (torch.float32, torch.bfloat16) for _ in range(100)]
    operations = OperationCounter()
    with OperationDispatchMode(operations):
        total = squared_norm(on_device, META)
        scale_gradients(on_device, total)
    assert (total.shape, total.dtype) == ((), torch.float32)
    assert operations.counts["_foreach_norm"] == operations.counts["_foreach_mul_"] == 2
    del operations.counts["detach"]  # runs on the host
    assert operations.counts.total() < 20


def test_a_bucket_is_upcast_and_rounded_by_one_operation_each_however_many_parameters_it_has() -> None:
    parameters = [torch.nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16, device=META)) for _ in range(50)]
    optimizer = MasterWeightOptimizer(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    operations = OperationCounter()
    with OperationDispatchMode(operations):
        optimizer.step()
    assert operations.counts["_foreach_copy_"] == 2
    assert operations.counts["copy_"] == 0
