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


def test_small_gradients_share_chunks_and_their_norm_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy has hundreds of them, and an operation for each costs more than its values."""
    monkeypatch.setattr(norm, "_CHUNK_ELEMENTS", 2048)
    gradients = [torch.full((size,), float(size)) for size in (1000, 1000, 100, 5, 0, 3000, 7)]
    norms_of_rows, chunks = norm._row_norms, []

    def noted(parts: list[torch.Tensor], scratch: torch.Tensor) -> torch.Tensor:
        chunks.append([part.numel() for part in parts])
        return norms_of_rows(parts, scratch)

    monkeypatch.setattr(norm, "_row_norms", noted)
    exact = sum(gradient.double().square().sum().item() for gradient in gradients)
    assert squared_norm(gradients, CPU).item() == pytest.approx(exact, rel=1e-6)
    assert chunks == [[1000, 1000], [100, 5, 0], [2048], [952, 7]]


def test_there_is_a_norm_of_nothing() -> None:
    assert squared_norm([], CPU).item() == 0
