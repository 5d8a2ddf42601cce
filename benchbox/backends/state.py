"""The state of a prepared policy as every backend describes it: by the parameters' names before wrapping, without copies.

Weights are what the optimizer steps: float32 masters where there are masters, else the parameters. Live weights that are
rounded from masters are not part of the state, because they follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from benchbox.dcp.shards import Shards, full_shards
from benchbox.observer.introspect.names import live_buffers, live_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    Layout = Callable[[Tensor], Shards]  # of tensors in the shape of a stepped one

WEIGHTS, BUFFERS, STATE, AVERAGES = "weights/", "buffers/", "state/", "averages/"


class ParameterEntry(TypedDict):
    """Optimizer state of a parameter that is no tensor of its shape: its group, and numbers such as the step count."""

    group: int
    numbers: dict[str, float]


@dataclass(frozen=True, slots=True)
class SteppedPart:
    """The part of a trained parameter that one tensor of the optimizer contains.

    `group` is the number of its parameter group, `state` the optimizer's entry for that tensor, and `layout` locates the part
    in it and in tensors of its shape.
    """

    name: str
    group: int
    tensor: Tensor
    state: dict[str, Any]
    layout: Layout

    def is_elementwise(self, key: str) -> bool:
        """Return whether an entry of the state has a value for each element; else it is a number, such as the step count."""
        value = self.state[key]
        return isinstance(value, Tensor) and key != "step" and value.shape == self.tensor.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Weights, optimizer state and buffers as this rank stores them. All tensors are views of the live ones.

    `averages` are further tensors by the names of their parameters, such as an exponential moving average of the weights.
    """

    stepped: Sequence[SteppedPart]
    frozen: Mapping[str, Shards]
    buffers: Mapping[str, Shards]
    averages: Mapping[str, Shards] = field(default_factory=dict)

    def tensors(self, *, with_frozen: bool = True) -> dict[str, Shards]:
        """Return all tensors by key: `weights/<name>`, `buffers/<name>`, `averages/<name>`, `state/<entry>/<name>`."""
        tensors: dict[str, Shards] = {}
        for part in self.stepped:
            _join(tensors, f"{WEIGHTS}{part.name}", part.layout(part.tensor))
            for key in filter(part.is_elementwise, part.state):
                _join(tensors, f"{STATE}{key}/{part.name}", part.layout(part.state[key]))
        prefixed = [(BUFFERS, self.buffers), (AVERAGES, self.averages), *([(WEIGHTS, self.frozen)] if with_frozen else [])]
        return tensors | {f"{prefix}{name}": shards for prefix, group in prefixed for name, shards in group.items()}

    def entries(self) -> dict[str, ParameterEntry]:
        """Return group and numbers of each trained parameter that this rank has elements of, by name."""
        return {
            part.name: {
                "group": part.group,
                "numbers": {key: float(value) for key, value in part.state.items() if not part.is_elementwise(key)},
            }
            for part in self.stepped
        }

    def set_numbers(self, entries: Mapping[str, ParameterEntry]) -> None:
        """Write the numbers of `entries` back. Parts of one tensor share its entry."""
        for part in self.stepped:
            entry = entries.get(part.name)
            for key, value in entry["numbers"].items() if entry else ():
                current = part.state.get(key)
                if isinstance(current, Tensor):
                    current.fill_(value)
                elif current is not None:
                    part.state[key] = type(current)(value)


def _join(tensors: dict[str, Shards], key: str, shards: Shards) -> None:
    tensors[key] = tensors[key].joined(shards) if key in tensors else shards


def model_state(
    model: nn.Module,
    stepped: Sequence[SteppedPart],
    layout_of: Callable[[str, nn.Parameter], Layout] = lambda _, __: full_shards,
) -> TrainingState:
    """Return the state of a model: frozen parameters are split as `layout_of` says, buffers are replicated."""
    frozen = {name: p for name, p in live_parameters(model) if not p.requires_grad}
    trained = {part.name for part in stepped}
    return TrainingState(
        stepped=stepped,
        frozen={name: layout_of(name, p)(p) for name, p in frozen.items() if name not in trained},
        buffers={name: full_shards(buffer) for name, buffer in live_buffers(model)},
    )


def optimizer_parts(
    model: nn.Module, optimizer: Optimizer, layout_of: Callable[[str, nn.Parameter], Layout] = lambda _, __: full_shards
) -> Iterator[SteppedPart]:
    """Yield a part for each parameter that an optimizer steps directly."""
    groups = group_numbers(optimizer)
    for name, parameter in live_parameters(model):
        if (group := groups.get(id(parameter))) is not None:
            state = optimizer.state.get(parameter, {})
            yield SteppedPart(name, group, parameter.detach(), state, layout_of(name, parameter))


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """Return the number of the group of each tensor that is in one, by the tensor's id."""
    return {id(tensor): number for number, group in enumerate(optimizer.param_groups) for tensor in group["params"]}


def create_optimizer_state(optimizer: Optimizer, tensors: Sequence[Tensor]) -> None:
    """Have an optimizer create its state of tensors in its groups, by a step with zero gradients and a rate of 0.

    Every optimizer creates its state at the first step, and only it knows which. What it creates is overwritten afterwards.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    try:
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for tensor in tensors:
            tensor.grad = None


def named_parameters(model: nn.Module, names: Collection[str]) -> list[nn.Parameter]:
    """Return those parameters with elements on this rank that have one of the names."""
    return [parameter for name, parameter in live_parameters(model) if name in names and parameter.numel()]
