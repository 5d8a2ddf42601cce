"""The norm that clipping divides by is float32 to its last digits, whatever the gradients are."""

from __future__ import annotations

import pytest
import torch

from benchbox.optim import norm, squared_norm

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
