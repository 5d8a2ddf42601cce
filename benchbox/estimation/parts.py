"""Optional parts of the batches of a training: which of them a step has decides which modules it uses."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from benchbox.session.build import open_cell_data
from benchbox.theory.flops import total_cost, training_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.registry.contracts import Batch, Policy
    from benchbox.spec.cell import Cell

Parts = frozenset[str]

_MOST_SAMPLES = 4096  # that are read to see which parts they have


def read_parts(cell: Cell, policy: Policy, steps: int) -> tuple[Parts, ...]:
    """Return the optional parts that the ranks agree on in each micro-step of the first `steps` steps.

    Nothing for a policy without `optional` parts, and if these steps have more than 4096 samples.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    if not getattr(policy, "optional", None) or steps * cell.samples_per_step > _MOST_SAMPLES:
        return ()
    prepare: Any = policy.prepare_batch  # type: ignore[attr-defined]
    # A step has the same samples, in the same order, however it is split.
    micro_batches = cell.world_size * cell.accumulation
    single = replace(cell, world_size=1, accumulation=micro_batches, data=replace(cell.data, workers=0))
    parts: list[Parts] = []
    with closing(open_cell_data(single, policy, 0, on_host=True)) as stream:
        for _ in range(steps):
            present = [prepare(batch)[1] for batch in islice(stream, micro_batches)]
            # each rank has a consecutive part of a step
            parts += [frozenset().union(*present[number :: cell.accumulation]) for number in range(cell.accumulation)]
    return tuple(parts)


def smallest_share(policy: Any, batch: Batch, present: Parts | None) -> float | None:
    """Return the FLOPs of a micro-batch without any optional part over those of this one, by the formula of the policy.

    None for a policy that has optional parts and declares no formula.

    Args:
        policy: in training.
        present: the parts of this one, if it is not to be seen by its masks.
    """
    if not getattr(policy, "optional", None):
        return 1.0
    if not hasattr(policy, "work"):
        return None

    def flops(parts: Parts | None) -> int:
        with fixed_parts(policy, parts):
            return total_cost(training_cost(policy.work(batch))).hardware

    whole = flops(present)
    return min(1.0, flops(frozenset()) / whole) if whole else None


@contextmanager
def fixed_parts(policy: Any, parts: Parts | None) -> Iterator[None]:
    """Let the steps of a policy have these optional parts, whatever their batch has."""
    if parts is None:
        yield
        return
    prepare = policy.prepare_batch

    def prepare_batch(batch: Batch, **options: Any) -> tuple[Batch, Parts]:
        return prepare(batch, **options)[0], parts

    policy.prepare_batch = prepare_batch
    try:
        yield
    finally:
        del policy.prepare_batch
