"""The norm that clipping divides by is float32 to its last digits, whatever the gradients are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.optim import norm, scale_gradients, squared_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("values", ["normal", "equal"])
def test_the_norm_is_that_of_float64_to_a_millionth(dtype: torch.dtype, values: str) -> None:
    """Also of three million equal elements, where roundings of a long sum do not cancel: there torch's own dot product in
    float32 is off by a ten-thousandth.
    """
    elements = 3 * 2**20 + 77
    drawn = torch.full((elements,), 0.0123) if values == "equal" else torch.randn(elements)
    gradients = [
        drawn.to(dtype),
        torch.zeros(0, dtype=dtype),
        torch.ones((), dtype=dtype),
        drawn[:1025].to(dtype).view(5, 205).T,
    ]
    exact = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert squared_norm(gradients, CPU).dtype == torch.float32
    assert squared_norm(gradients, CPU).item() == pytest.approx(exact, rel=1e-6)


def test_what_one_chunk_leaves_behind_is_not_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short chunk follows a long one in the same scratch memory."""
    monkeypatch.setattr(norm, "_CHUNK_ELEMENTS", 2048)
    assert squared_norm([torch.ones(3000, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)], CPU).item() == 3005


def test_there_is_a_norm_of_nothing() -> None:
    assert squared_norm([], CPU).item() == 0


class OperationNames:
    """Records the names of the tensor operations that run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_operation(self, operation: Any, *_: Any) -> None:
        self.names.append(str(operation).removeprefix("aten."))


def test_scaling_gives_the_bits_of_scaling_each_gradient_in_its_own_dtype() -> None:
    gradients = [torch.randn(5, 7), torch.randn(11).bfloat16(), torch.zeros(0), torch.randn(3, 3).half(), torch.randn(())]
    coefficient = torch.tensor(0.3123456)
    expected = [gradient * coefficient.to(gradient.dtype) for gradient in gradients]
    scale_gradients(gradients, coefficient)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


def test_gradients_on_an_accelerator_take_one_operation_for_each_dtype() -> None:
    """Shown on meta tensors, which stand in for those of a GPU: neither speed nor values were measured on one."""
    meta = torch.device("meta")
    gradients = [torch.empty(5, dtype=dtype, device=meta) for dtype in (torch.float32, torch.bfloat16) for _ in range(100)]
    operations = OperationNames()
    with OperationDispatchMode(operations):
        total = squared_norm(gradients, meta)
        scale_gradients(gradients, total)
    assert (total.shape, total.dtype) == ((), torch.float32)
    assert [name for name in operations.names if name.startswith("_foreach")] == [
        *["_foreach_norm.Scalar"] * 2,
        *["_foreach_mul_.Tensor"] * 2,
    ]
    assert len([name for name in operations.names if name != "detach.default"]) < 20  # a detach runs on the host


def test_the_norm_by_multi_tensor_kernels_is_that_of_each_tensor() -> None:
    """The operations of the accelerator's branch, run on the CPU."""
    gradients = [torch.randn(50), torch.randn(3, 4).bfloat16(), torch.randn(9).bfloat16()]
    groups = list(norm._group_by_device_and_dtype(gradients))
    assert [len(group) for group in groups] == [1, 2]
    norms = torch.cat([torch.stack(torch._foreach_norm(group, 2, dtype=torch.float32)) for group in groups])
    assert norms.dtype == torch.float32
    assert torch.dot(norms, norms).item() == pytest.approx(squared_norm(gradients, CPU).item(), rel=1e-6)
