"""Comparison of requested and observed: a cell that ran anything other than what was requested fails, whatever its speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.errors import MismatchError
from benchbox.registry.attention import attention_mismatch
from benchbox.registry.backends import backend_info
from benchbox.registry.padding import padding_mismatch
from benchbox.registry.recipes import recipe_by_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.backends.observe import Observed
    from benchbox.observer.facts import SteppedTensor
    from benchbox.registry.launch_record import CompilationRecord, PartSizes
    from benchbox.spec.cell import Cell


_LEAST_SHARE = 0.1  # of the matrix products, in the dtype of the recipe


def check_backend(cell: Cell, observed: Observed) -> None:
    """Compare a cell with what was observed before its first step.

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
    if backend_info(cell.backend).shards_optimizer and observed.shard_numel >= observed.trainable_numel:
        raise MismatchError(
            f"{cell.backend} steps {observed.shard_numel} elements on this rank and the policy trains "
            f"{observed.trainable_numel}: nothing is sharded"
        )
    if cell.freeze != "full" and observed.trainable_numel == observed.total_numel:
        raise MismatchError(f"requested freeze {cell.freeze}, observed that all {observed.total_numel} elements train")


def check_compilation(cell: Cell, compilation: CompilationRecord | None) -> None:
    """Compare a cell with what torch.compile did in its steps.

    Raises:
        MismatchError: nothing was compiled.
    """
    if cell.compile != "off" and (compilation is None or not compilation["graphs"]):
        raise MismatchError(f"requested compile {cell.compile}, observed that nothing was compiled")


def check_micro_batches(cell: Cell, sizes: Mapping[str, PartSizes] | None) -> None:
    """Compare a cell with the sizes of the micro-batches that its steps got.

    Raises:
        MismatchError: full padding was requested and micro-batches were cut, or they are larger than the policy's spec.
    """
    if sizes is not None and (mismatch := padding_mismatch(cell.padding, sizes)):
        raise MismatchError(mismatch)


def check_step(
    cell: Cell,
    *,
    kernel: str | None,
    sites: Mapping[str, Sequence[str]] | None = None,
    checkpointed: int | None,
    products: Mapping[str, int],
    stepped: Iterable[SteppedTensor],
) -> None:
    """Compare a cell with what was observed in a step.

    Args:
        kernel: names of the attention kernels that ran, joined by `+`.
        sites: the same names by call site.
        products: number of matrix products of the forward pass by dtype. A policy may compute a part in another one on purpose,
            such as a tower in float32: autocast or a wrong recipe change nearly all of them.

    Raises:
        MismatchError: another attention kernel ran, checkpointing did not happen (or did unasked), hardly any matrix product
            ran in the dtype of the recipe, or the optimizer stepped tensors of another one.
    """
    if kernel is not None and (mismatch := attention_mismatch(cell.attention, kernel.split("+"), sites or {})):
        raise MismatchError(mismatch)
    if checkpointed is not None and bool(checkpointed) != cell.checkpointing:
        requested, hint = "on", ""
        if not cell.checkpointing:
            requested, hint = "off", ", so the policy recomputes by itself: build it without, or write checkpointing: true"
        raise MismatchError(f"requested checkpointing {requested}, observed {checkpointed} modules run twice{hint}")
    recipe = recipe_by_name(cell.recipe)
    # Of compiled code no product is seen, and the few others need not be like those.
    if cell.compile == "off" and products.get(recipe.compute, 0) < _LEAST_SHARE * sum(products.values()):
        counts = ", ".join(f"{count} in {dtype}" for dtype, count in sorted(products.items()))
        raise MismatchError(f"recipe {cell.recipe} computes in {recipe.compute}, observed matrix products: {counts}")
    dtype = recipe.stepped
    if dtype is not None and (other_dtypes := sorted({tensor.dtype for tensor in stepped} - {dtype})):
        raise MismatchError(f"recipe {cell.recipe} steps {dtype} tensors, observed {', '.join(other_dtypes)}")
