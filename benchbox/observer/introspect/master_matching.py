"""Masters of an optimizer that nobody knows: which live parameters they stand for."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..numerics.expected_update import sample
from ..numerics.probes import can_look_at
from .names import MasterLink
from .tensors import local_shard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import torch
    from torch import Tensor, nn

    Named = tuple[str, nn.Parameter]

_COMPARED = 64  # elements: enough to tell tensors apart that were trained, or drawn at random


def matched(stepped: Sequence[Tensor], live: Sequence[Named], linked: Collection[int]) -> Iterator[MasterLink]:
    """Links by shapes, or else by values.

    Args:
        stepped: all tensors that the optimizer steps, none of which a model computes with.
        live: the models' parameters by name.
        linked: ids of tensors that were linked to a live one before, and of those.
    """
    trainable = [(name, parameter) for name, parameter in live if parameter.requires_grad]
    if [tensor.shape for tensor in stepped] == [parameter.shape for _, parameter in trainable]:
        for tensor, (name, parameter) in zip(stepped, trainable, strict=True):
            yield MasterLink(tensor, name, parameter.detach(), ((name, id(parameter)),))
    else:
        free = [tensor for tensor in stepped if id(tensor) not in linked]
        yield from _by_value(free, [(name, parameter) for name, parameter in trainable if id(parameter) not in linked])


def _by_value(stepped: Iterable[Tensor], live: Iterable[Named]) -> Iterator[MasterLink]:
    """Each tensor is linked to the parameter that it rounds to. Where several are alike, as norms are before they are trained,
    it stands for one of them.
    """
    candidates: dict[tuple[object, ...], list[Named]] = defaultdict(list)
    dtypes: set[torch.dtype] = set()
    for name, parameter in live:
        if can_look_at(parameter):
            dtypes.add(parameter.dtype)
            candidates[_print(parameter, parameter.dtype)].append((name, parameter))
    rounding: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in stepped:
        if can_look_at(tensor):
            for dtype in dtypes:
                rounding[_print(tensor, dtype)].append(tensor)
    for mark, tensors in rounding.items():
        alike = candidates.get(mark)
        if alike is None:
            continue
        covers = tuple((name, id(parameter)) for name, parameter in alike)
        (name, parameter), *others = alike
        told = not others and len(tensors) == 1
        for tensor in tensors:
            yield MasterLink(tensor, f"{name} or one alike" if others else name, parameter.detach() if told else None, covers)


def _print(tensor: Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    """What is the same of a parameter and of what rounds to it."""
    held = local_shard(tensor)
    return tuple(held.shape), dtype, *sample(held, _COMPARED).to(dtype).tolist()
