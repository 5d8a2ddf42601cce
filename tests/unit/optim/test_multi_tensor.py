"""Multi-tensor kernels of the step of masters, shown on meta tensors: neither speed nor values were measured on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.optim import MasterWeightOptimizer


class OperationCounter:
    """Counts the tensor operations that run, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_operation(self, operation: Any, *_: Any) -> None:
        self.counts[str(operation).removeprefix("aten.")] += 1


def test_a_bucket_is_upcast_and_rounded_by_one_operation_each_however_many_parameters_it_has() -> None:
    parameters = [torch.nn.Parameter(torch.empty(8, 8, dtype=torch.bfloat16, device="meta")) for _ in range(50)]
    optimizer = MasterWeightOptimizer(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    operations = OperationCounter()
    with OperationDispatchMode(operations):
        optimizer.step()
    assert operations.counts["_foreach_copy_.default"] == 2
    assert operations.counts["copy_.default"] == 0
