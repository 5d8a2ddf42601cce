from __future__ import annotations

import pytest
import torch
from benchbox_policies._layers.nn.attention import attend


def inputs(groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 5, 16), (2, groups, 7, 16), (2, groups, 7, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def some_mask() -> torch.Tensor:
    visible = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    visible[:, :, 0] = True
    return visible


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("visible", [None, some_mask()], ids=["unmasked", "masked"])
def test_eager_and_sdpa_agree_in_value_and_gradient(groups, visible):
    results = []
    for kernel in ("eager", "sdpa"):
        query, key, value = inputs(groups)
        attended = attend(query, key, value, visible, kernel)
        attended.square().sum().backward()
        results.append((attended, query.grad, key.grad, value.grad))
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=1e-5, atol=1e-5)


def test_eager_and_sdpa_agree_in_bfloat16_to_its_precision():
    query, key, value = inputs(1, torch.bfloat16)
    eager, sdpa = (attend(query, key, value, some_mask(), kernel) for kernel in ("eager", "sdpa"))
    assert eager.dtype == sdpa.dtype == torch.bfloat16
    torch.testing.assert_close(eager, sdpa, rtol=2e-2, atol=2e-2)


def test_attention_is_the_weighted_mean_of_the_values_each_query_sees():
    query, key, value = (tensor.detach().double() for tensor in inputs(1))
    visible = some_mask()
    attended = attend(query, key, value, visible, "sdpa").unflatten(-1, (4, 16))
    for b, h, q in ((0, 0, 0), (1, 3, 4), (0, 2, 3)):
        seen = visible[b, q].nonzero()[:, 0]
        weights = torch.softmax(key[b, 0, seen] @ query[b, h, q] / 4.0, dim=0)
        torch.testing.assert_close(attended[b, q, h], weights @ value[b, 0, seen])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gets_no_nan_and_gives_none(kernel, dtype):
    query, key, value = inputs(1, dtype)
    visible = some_mask()
    visible[0, 2] = False
    attended = attend(query, key, value, visible, kernel)
    attended[:, [0, 1, 3, 4]].float().sum().backward()
    for tensor in (attended, query.grad, key.grad, value.grad):
        assert tensor.isfinite().all()
