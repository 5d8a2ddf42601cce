from __future__ import annotations

import pytest
import torch
from benchbox_policies._layers.nn.attention import attend


def inputs(groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 4, 5, 16), (2, groups, 7, 16), (2, groups, 7, 16))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def random_mask() -> torch.Tensor:
    mask = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[:, :, 0] = True
    return mask


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, random_mask()], ids=["unmasked", "masked"])
def test_eager_and_sdpa_agree_in_value_and_gradient(groups, mask):
    results = []
    for kernel in ("eager", "sdpa"):
        query, key, value = inputs(groups)
        output = attend(query, key, value, mask, kernel)
        output.square().sum().backward()
        results.append((output, query.grad, key.grad, value.grad))
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(eager, sdpa, rtol=1e-5, atol=1e-5)


def test_eager_and_sdpa_agree_in_bfloat16_to_its_precision():
    query, key, value = inputs(1, torch.bfloat16)
    eager, sdpa = (attend(query, key, value, random_mask(), kernel) for kernel in ("eager", "sdpa"))
    assert eager.dtype == sdpa.dtype == torch.bfloat16
    torch.testing.assert_close(eager, sdpa, rtol=2e-2, atol=2e-2)


def test_attention_is_the_weighted_mean_of_the_values_each_query_sees():
    query, key, value = (tensor.detach().double() for tensor in inputs(1))
    mask = random_mask()
    output = attend(query, key, value, mask, "sdpa").unflatten(-1, (4, 16))
    for b, h, q in ((0, 0, 0), (1, 3, 4), (0, 2, 3)):
        keys = mask[b, q].nonzero()[:, 0]
        weights = torch.softmax(key[b, 0, keys] @ query[b, h, q] / 4.0, dim=0)
        torch.testing.assert_close(output[b, q, h], weights @ value[b, 0, keys])


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gets_no_nan_and_gives_none(kernel, dtype):
    query, key, value = inputs(1, dtype)
    mask = random_mask()
    mask[0, 2] = False
    output = attend(query, key, value, mask, kernel)
    output[:, [0, 1, 3, 4]].float().sum().backward()
    for tensor in (output, query.grad, key.grad, value.grad):
        assert tensor.isfinite().all()
