"""Utilisation of the device's peak by the steps of a training, from the policy's formulas of FLOPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchbox.measure.flops import DEVICE_PEAKS, utilisation
from benchbox.theory.flops import sum_costs, total_cost, training_cost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchbox.registry.contracts import Batch, Policy


class StepUtilisation:
    """MFU of steps of known duration. The FLOPs are those of the first step: later ones have batches of the same shape.

    Steps whose batches have other optional parts than the first one's take more or fewer, which is not counted.

    Args:
        policy: from `copy_meta_policy`, None if it has no formula.
        accumulation: micro-batches of a step.
        compute: dtype of the recipe's products.
        is_partial: whether the latest step left out gradients that the formula counts, those of a backbone that is frozen for
            some steps.
        shapes_vary: whether batches differ in shape from step to step, so that the FLOPs of the first step are of no other.
    """

    def __init__(
        self,
        policy: Policy | None,
        device: torch.device,
        *,
        accumulation: int,
        compute: str,
        is_partial: Callable[[], bool] = lambda: False,
        shapes_vary: bool = False,
    ) -> None:
        self._policy = policy
        self._device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}"
        self._accumulation = accumulation
        self._compute = compute
        self._is_partial = is_partial
        self._shapes_vary = shapes_vary
        self._first_batches: list[Batch] = []
        self._flops: int | None = None

    def record(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the micro-batches; those of the first step are recorded where the peak of the device is known."""
        is_counted = self._device_name in DEVICE_PEAKS and self._policy is not None and not self._shapes_vary
        return self._record(batches) if is_counted else batches

    def _record(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._flops is None and len(self._first_batches) < self._accumulation:
                self._first_batches.append(batch)
            yield batch

    def mfu(self, step_s: float) -> tuple[float | None, str | None]:
        """Return the model FLOPs utilisation of this rank in steps of `step_s`, or None and the reason."""
        if self._policy is None:
            return None, "the policy declares no formula of its FLOPs"
        if self._device_name in DEVICE_PEAKS:  # else `utilisation` says that no peak is known
            if self._shapes_vary:
                return None, "batches differ in shape from step to step (padding: longest)"
            if self._is_partial():
                return None, "the backbone is frozen now, and the formula counts its gradients"
            if self._flops is None:
                costs = sum_costs(training_cost(self._policy.work(batch)) for batch in self._first_batches)
                self._flops = total_cost(costs).model
                self._first_batches.clear()  # which are on the device
        result = utilisation(self._flops or 0, 0, [step_s], self._device_name, {self._compute})
        return result["mfu"], result["mfu_reason"]
