"""Floating-point operations of a training step, from the matrix products of its forward pass.

A multiply-add counts as 2. Only products count: those of matrices, of convolutions, and the two of attention. Products that are
computed once are the model's work. Products that are recomputed to save memory are counted separately: model FLOPs utilisation
leaves them out, hardware FLOPs utilisation includes them (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of two factors in a forward pass. One of them may be a weight."""

    tower: str
    flops: int  # forward
    gradients: int  # factors that need a gradient: 0, 1 or 2
    fused: bool = False  # the result is not stored: backward recomputes it, as fused attention does with its scores
    unit: int | None = None  # the checkpointed unit that contains it
    saved: bool = False  # the next operation needs the result in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs of a step, or of one tower in it. `recomputed` is not included in the other two."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    def __add__(self, addend: Cost) -> Cost:
        return Cost(
            forward=self.forward + addend.forward,
            backward=self.backward + addend.backward,
            recomputed=self.recomputed + addend.recomputed,
        )

    @property
    def model(self) -> int:
        """FLOPs that the model requires, without recomputation."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """FLOPs that the device executes."""
        return self.model + self.recomputed


def training_cost(products: Iterable[Product]) -> dict[str, Cost]:
    """Return the cost of forward and backward by tower.

    Args:
        products: those of the forward pass, in the order of execution.
    """
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    units: defaultdict[int, list[Product]] = defaultdict(list)
    for product in products:
        # The gradient of each factor is a product of the result's gradient with the other factor: as large as the forward.
        recomputed = product.flops if product.fused and product.gradients else 0
        costs[product.tower] += Cost(forward=product.flops, backward=product.gradients * product.flops, recomputed=recomputed)
        if product.unit is not None:
            units[product.unit].append(product)
    for unit in units.values():
        for product in _recomputed_products(unit):
            costs[product.tower] += Cost(recomputed=product.flops)
    return dict(costs)


def _recomputed_products(unit: list[Product]) -> list[Product]:
    """Return the products of a checkpointed unit that run a second time. torch stops as soon as it has all that backward needs.

    Backward needs the factors of every product with a gradient, and these exist before the product runs.
    """
    final = max((index for index, product in enumerate(unit) if product.gradients or product.saved), default=0)
    return unit[: final + unit[final].saved]


def total_cost(costs: Mapping[str, Cost]) -> Cost:
    """Return the cost of all towers together."""
    return sum(costs.values(), Cost())


def sum_costs(micro_batches: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    """Sum the costs of several micro-batches by tower."""
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    for micro_batch in micro_batches:
        for tower, cost in micro_batch.items():
            costs[tower] += cost
    return dict(costs)
