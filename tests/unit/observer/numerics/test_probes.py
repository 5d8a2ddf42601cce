"""Tensors that cannot be probed, beside one that can."""

from __future__ import annotations

import torch
from torch import nn

from benchbox.observer.numerics.probes import _sampled_state
from benchbox.observer.observer import StepObserver


def test_complex_and_sparse_tensors_are_counted_and_do_not_prevent_probing_the_others():
    plain, rotation = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=torch.complex64))
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD([plain, rotation, table.weight], lr=0.1)
    with StepObserver(source="command", steps=3) as observer:
        for _ in range(3):
            optimizer.zero_grad()
            ((plain * rotation.abs()).sum() + table(torch.tensor([1, 2])).sum()).backward()
            optimizer.step()
    facts = observer.facts()
    assert facts.problems == ()
    probed_steps = {tensor.dtype: tensor.numbers.steps for tensor in facts.stepped if tensor.shape == (4,)}
    assert probed_steps == {"float32": 3, "complex64": 0}
    assert [tensor.numbers.steps for tensor in facts.stepped if tensor.shape == (8, 4)] == [0]


def test_numbers_on_another_device_are_no_state_of_a_scalar_parameter():
    """NAdam keeps mu_product on the CPU beside a parameter of the same shape on a GPU."""
    state = {"mu_product": torch.ones((), device="meta"), "exp_avg": torch.ones(())}
    assert set(_sampled_state(torch.ones(()), state)) == {"exp_avg"}
