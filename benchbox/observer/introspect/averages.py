"""Averages of weights beside the model, such as an EMA or a target network, and whether their updates arrive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..facts import WeightAverage
from ..numerics.expected_update import sample
from ..numerics.probes import MAX_ELEMENTS, can_probe
from .names import live_parameters
from .tensors import dtype_name, local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Significant bits of a number, the hidden one included. In a warm-up an average in float32 may be thousands of its own units
# behind, and its update still less than one of them, which is no fault: it is measured in those of bfloat16.
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 8, "float64": 8}
# An average that takes a tenth of the difference moves long before it is so far away.
_LAGGING_UNITS = 8.0


class _Pair(NamedTuple):
    name: str
    parameter: str
    average: weakref.ref[Tensor]  # a script may replace it at every update, and must not keep the memory of the old one
    live: Tensor


class _Record(NamedTuple):
    pair: _Pair
    values: Tensor  # a sample of the average
    version: int  # torch's count of writes
    step: int


class AverageWatch:
    """Compares averages of the weights with the weights, before and after a number of steps."""

    def __init__(self) -> None:
        self.searched = False
        self._records: dict[int, _Record] = {}

    def record(self, models: Sequence[nn.Module], others: Iterable[tuple[str, Sequence[Tensor]]], step: int) -> None:
        """Start watching the averages among other tensors: those with the shapes of a model's parameters, in order.

        Args:
            models: the models that are trained.
            others: modules beside them, and lists of tensors, each by its name.
        """
        self.searched = True
        for name, tensors in others:
            for pair in _pairs(name, tensors, models):
                if (average := pair.average()) is not None:
                    self._records.setdefault(id(average), _record(pair, average, step))

    def __bool__(self) -> bool:
        return bool(self._records)

    def begin_again(self, step: int) -> None:
        """Compare with the averages before this step instead: the first update may copy the weights."""
        averages = {key: (record.pair, record.pair.average()) for key, record in self._records.items()}
        self._records = {key: _record(pair, average, step) for key, (pair, average) in averages.items() if average is not None}

    def facts(self, last_step: int) -> Iterator[WeightAverage]:
        """Yield what became of each average."""
        for pair, values, version, step in self._records.values():
            if (average := pair.average()) is None:
                continue
            now = _values(average)
            live = _values(pair.live).to(now.device)
            if not now.shape == live.shape == values.shape:  # one was sharded, or freed, in the meantime
                continue
            difference = (live.float() - now.float()).abs()
            lagging = difference >= _LAGGING_UNITS * _unit_in_last_place(now)
            stuck = now == values
            yield WeightAverage(
                name=pair.name,
                parameter=pair.parameter,
                dtype=dtype_name(average),
                elements=average.numel(),
                lagging=int(lagging.sum()),
                stuck=int((lagging & stuck).sum()),
                written=average._version > version or not bool(stuck.all()),  # noqa: SLF001 (no public name)
                steps=last_step - step + 1,
            )


def _record(pair: _Pair, average: Tensor, step: int) -> _Record:
    return _Record(pair, _values(average), average._version, step)  # noqa: SLF001 (no public name)


def _values(tensor: Tensor) -> Tensor:
    return sample(local_shard(tensor), MAX_ELEMENTS)


def _pairs(name: str, tensors: Sequence[Tensor], models: Sequence[nn.Module]) -> Iterator[_Pair]:
    for model in models:
        live = list(live_parameters(model))
        if _local_shapes(tensors) == _local_shapes(parameter for _, parameter in live):
            for tensor, (own_name, parameter) in zip(tensors, live, strict=True):
                is_counted = not tensor.is_inference()  # others have no count of writes
                if is_counted and dtype_name(tensor) in _SIGNIFICANT_BITS and can_probe(tensor) and can_probe(parameter):
                    yield _Pair(name, own_name, weakref.ref(tensor), parameter)
            return


def _local_shapes(tensors: Iterable[Tensor]) -> list[torch.Size]:
    return [local_shard(tensor).shape for tensor in tensors]


def _unit_in_last_place(values: Tensor) -> Tensor:
    _, exponent = torch.frexp(values.float())
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - _SIGNIFICANT_BITS[dtype_name(values)])
