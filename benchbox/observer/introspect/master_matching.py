"""Masters of optimizers that declare none: matching stepped tensors to live parameters by shape or by value."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..numerics.expected_update import sample
from ..numerics.probes import can_probe
from .masters import MasterLink
from .tensors import local_shard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import torch
    from torch import Tensor, nn

    NamedParameter = tuple[str, nn.Parameter]

_COMPARED_ELEMENTS = 64  # enough to tell apart tensors that were trained or randomly initialised


def match_masters(stepped: Sequence[Tensor], live: Sequence[NamedParameter], linked: Collection[int]) -> Iterator[MasterLink]:
    """Yield links between stepped tensors and live parameters: by the order of shapes, or else by values.

    Args:
        stepped: all tensors that the optimizer steps; no model computes with any of them.
        live: the models' parameters with their names.
        linked: ids of the tensors that are linked already, stepped and live.
    """
    trainable = [(name, parameter) for name, parameter in live if parameter.requires_grad]
    if [tensor.shape for tensor in stepped] == [parameter.shape for _, parameter in trainable]:
        for tensor, (name, parameter) in zip(stepped, trainable, strict=True):
            yield MasterLink(tensor, name, parameter, ((name, id(parameter)),))
    else:
        unlinked = [tensor for tensor in stepped if id(tensor) not in linked]
        yield from _match_values(unlinked, [(name, parameter) for name, parameter in trainable if id(parameter) not in linked])


def _match_values(stepped: Iterable[Tensor], live: Iterable[NamedParameter]) -> Iterator[MasterLink]:
    """Yield a link from each tensor to the parameter that it rounds to.

    Several parameters may be identical, as norms are before training; then a tensor stands for one of them.
    """
    candidates: dict[tuple[object, ...], list[NamedParameter]] = defaultdict(list)
    dtypes: set[torch.dtype] = set()
    for name, parameter in live:
        if can_probe(parameter):
            dtypes.add(parameter.dtype)
            candidates[_fingerprint(parameter, parameter.dtype)].append((name, parameter))
    rounded: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in stepped:
        if can_probe(tensor):
            for dtype in dtypes:
                rounded[_fingerprint(tensor, dtype)].append(tensor)
    for fingerprint, tensors in rounded.items():
        identical = candidates.get(fingerprint)
        if identical is None:
            continue
        covers = tuple((name, id(parameter)) for name, parameter in identical)
        (name, parameter), *duplicates = identical
        live_tensor = parameter if not duplicates and len(tensors) == 1 else None
        for tensor in tensors:
            yield MasterLink(tensor, f"{name} or one alike" if duplicates else name, live_tensor, covers)


def _fingerprint(tensor: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    """Return the local shape, the dtype and sampled values in it: equal for a parameter and a tensor that rounds to it."""
    shard = local_shard(tensor)
    return tuple(shard.shape), dtype, *sample(shard, _COMPARED_ELEMENTS).to(dtype).tolist()
