"""Floating-point operations of a training step, from the matrix products of its forward pass.

A multiply-add counts 2. Only products count: of matrices, of convolutions, and the two of attention. What is computed once is
the model's work; what memory is saved by computing again is counted apart, so that model FLOPs utilisation leaves it out and
hardware FLOPs utilisation has it in (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of a forward pass: of two factors, of which one may be a weight."""

    tower: str
    flops: int  # forward
    needed: int  # factors that need a gradient: 0, 1 or 2
    fused: bool = False  # its result is not kept: backward forms it again, as fused attention does with its scores
    unit: int | None = None  # the checkpointed unit that it is part of
    kept: bool = False  # what follows it needs its result in backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs of a step, or of a tower's part in it. `recomputed` is not part of the other two."""

    forward: int = 0
    backward: int = 0
    recomputed: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            recomputed=self.recomputed + other.recomputed,
        )

    @property
    def model(self) -> int:
        """What the model asks for, however it is computed."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What the device does."""
        return self.model + self.recomputed


def training_cost(products: Iterable[Product]) -> dict[str, Cost]:
    """What forward and backward cost, by tower.

    Args:
        products: of the forward pass, in the order in which they run.
    """
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    units: defaultdict[int, list[Product]] = defaultdict(list)
    for product in products:
        # The gradient of each factor is a product of the result's gradient with the other factor: as large as the forward.
        again = product.flops if product.fused and product.needed else 0
        costs[product.tower] += Cost(forward=product.flops, backward=product.needed * product.flops, recomputed=again)
        if product.unit is not None:
            units[product.unit].append(product)
    for unit in units.values():
        for product in _run_again(unit):
            costs[product.tower] += Cost(recomputed=product.flops)
    return dict(costs)


def _run_again(unit: list[Product]) -> list[Product]:
    """The products of a checkpointed unit that run a second time: torch stops as soon as it has all that backward needs.

    Backward needs the factors of a product of which any needs a gradient, and they are there before it runs.
    """
    last = max((place for place, product in enumerate(unit) if product.needed or product.kept), default=0)
    return unit[: last + unit[last].kept]


def total(costs: Mapping[str, Cost]) -> Cost:
    """Of all towers."""
    return sum(costs.values(), Cost())


def summed(steps: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    """Costs by tower of several micro-batches together."""
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    for step in steps:
        for tower, cost in step.items():
            costs[tower] += cost
    return dict(costs)
