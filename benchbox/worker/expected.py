"""Requested against observed: a cell that is not what it was asked to be fails, whatever speed it reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.errors import MismatchError
from benchbox.registry.recipes import RECIPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.backends.observe import Observed
    from benchbox.observer.facts import SteppedTensor
    from benchbox.spec.cell import Cell

_SHARDS_OPTIMIZER = frozenset({"fsdp1_full", "fsdp1_grad_op", "fsdp2", "hsdp", "zero1", "zero2", "zero3"})


def check_backend(cell: Cell, observed: Observed) -> None:
    """Before the first step.

    Raises:
        MismatchError: another backend runs, over another number of ranks, nothing is really sharded, or nothing frozen.
    """
    if observed.backend != cell.backend:
        raise MismatchError(
            f"requested backend {cell.backend}, observed {observed.backend}: "
            f"{observed.model_class}, {' > '.join(observed.optimizer_chain)}, {observed.sharding}"
        )
    if observed.world_size != cell.world_size:
        raise MismatchError(f"requested {cell.world_size} ranks, observed {observed.world_size}")
    if cell.backend in _SHARDS_OPTIMIZER and observed.shard_numel >= observed.trainable_numel:
        raise MismatchError(
            f"{cell.backend} steps {observed.shard_numel} elements on this rank and the policy trains "
            f"{observed.trainable_numel}: nothing is sharded"
        )
    if cell.freeze != "full" and observed.trainable_numel == observed.total_numel:
        raise MismatchError(f"requested freeze {cell.freeze}, observed that all {observed.total_numel} elements train")


def check_step(cell: Cell, *, kernel: str | None, checkpointed: int | None, stepped: Iterable[SteppedTensor]) -> None:
    """After a step was looked at.

    Raises:
        MismatchError: another attention kernel ran, checkpointing did not happen (or did unasked), or the optimizer stepped
            tensors of another dtype than the recipe says.
    """
    if kernel is not None and kernel.split(":")[0] != cell.attention:
        raise MismatchError(f"requested {cell.attention} attention, observed {kernel}")
    if checkpointed is not None and bool(checkpointed) != cell.checkpointing:
        asked = "on" if cell.checkpointing else "off"
        raise MismatchError(f"requested checkpointing {asked}, observed {checkpointed} modules run twice")
    wanted = RECIPES[cell.recipe].stepped
    if wanted is not None and (wrong := sorted({tensor.dtype for tensor in stepped} - {wanted})):
        raise MismatchError(f"recipe {cell.recipe} steps {wanted} tensors, observed {', '.join(wrong)}")
