"""Averages of weights beside the model, such as an EMA or a target network, and whether their updates arrive."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..facts import WeightAverage
from ..numerics.expected_update import sample
from ..numerics.probes import MAX_ELEMENTS, can_probe
from .tensor_sources import followed_parameters, parameter_lists, read_sources
from .tensors import dtype_name, local_shard

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from .tensor_sources import NamedParameters, TensorSource

# Significant bits of a number, the hidden one included. In a warm-up an average in float32 may be thousands of its own units
# behind, and its update still less than one of them, which is no fault: it is measured in those of bfloat16.
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 8, "float64": 8}
# An average that takes a tenth of the difference moves long before it is so far away.
_LAGGING_UNITS = 8.0
# Sums of gradients have the shapes of weights, too. An average is nearer to the weights than half their norm.
_NEAR = 0.5


class _Record(NamedTuple):
    values: Tensor  # a sample of the average
    version: int  # torch's count of writes
    average: weakref.ref[Tensor]  # a script may replace it at every update, and must not keep the memory of the old one


@dataclass
class _WatchedSource:
    """A place of averages, the parameters that they follow, and the averages at the beginning of a number of steps.

    A tensor that was replaced between two looks at it, and again until the third, is replaced at every update.
    """

    source: TensorSource
    parameters: NamedParameters
    records: list[_Record | None]
    step: int
    was_replaced: bool = False

    def pairs(self, averages: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Tensor, _Record]]:
        """Yield (name of the parameter, parameter, average, record) of the averages that are there now."""
        if len(averages) == len(self.records) == len(self.parameters):
            for (name, parameter), average, record in zip(self.parameters, averages, self.records, strict=True):
                if record is not None and _can_watch(average, parameter):
                    yield name, parameter, average, record

    def begin_again(self, averages: Sequence[Tensor], step: int) -> None:
        """Compare with the averages before this step instead."""
        self.was_replaced = any(record.average() is not average for _, _, average, record in self.pairs(averages))
        self.records = _records(averages, self.parameters)
        self.step = step


class AverageWatch:
    """Compares averages of the weights with the weights, before and after a number of steps."""

    def __init__(self) -> None:
        self.searched = False
        self._watched: dict[Hashable, _WatchedSource] = {}

    def record(self, models: Sequence[nn.Module], sources: Iterable[TensorSource], step: int) -> None:
        """Start watching the averages among tensors beside the models: those with the shapes of parameters, in order."""
        self.searched = True
        new = [source for source in sources if source.key not in self._watched]
        watched_ids = {id(average) for _, averages in self._read() for average in averages}
        lists = parameter_lists(models)
        for source, averages in zip(new, read_sources(new), strict=True):
            if not watched_ids.isdisjoint(map(id, averages)):
                continue
            parameters = followed_parameters(averages, lists)
            if parameters and (source.is_module or _are_near(averages, parameters)):
                watched_ids.update(map(id, averages))
                records = _records(averages, parameters)
                self._watched[source.key] = _WatchedSource(source, parameters, records, step)

    def begin_again(self, step: int) -> None:
        """Compare with the averages before this step instead: the first update may copy the weights."""
        for watched, averages in self._read():
            watched.begin_again(averages, step)

    def _read(self) -> list[tuple[_WatchedSource, list[Tensor]]]:
        watched = list(self._watched.values())
        return list(zip(watched, read_sources([source.source for source in watched]), strict=True))

    def facts(self, last_step: int) -> Iterator[WeightAverage]:
        """Yield what became of each average."""
        for watched, averages in self._read():
            for name, parameter, average, record in watched.pairs(averages):
                now = _values(average)
                live = _values(parameter).to(now.device)
                if not now.shape == live.shape == record.values.shape:  # one was sharded, or freed, in the meantime
                    continue
                lagging = (live.float() - now.float()).abs() >= _LAGGING_UNITS * _unit_in_last_place(now)
                stuck = now == record.values.to(now.device)
                is_same = record.average() is average
                yield WeightAverage(
                    name=watched.source.name,
                    parameter=name,
                    dtype=dtype_name(average),
                    elements=average.numel(),
                    lagging=int(lagging.sum()),
                    stuck=int((lagging & stuck).sum()),
                    written=not bool(stuck.all()) or (average._version > record.version if is_same else watched.was_replaced),  # noqa: SLF001
                    steps=last_step - watched.step + 1,
                )


def _records(averages: Sequence[Tensor], parameters: NamedParameters) -> list[_Record | None]:
    """Return the record of each average; None for a tensor that cannot be watched. Without the averages, an empty list."""
    if len(averages) != len(parameters):
        return []
    return [
        _Record(_values(average), average._version, weakref.ref(average)) if _can_watch(average, parameter) else None  # noqa: SLF001
        for average, (_, parameter) in zip(averages, parameters, strict=True)
    ]


def _can_watch(average: Tensor, parameter: Tensor) -> bool:
    # Inference tensors have no count of writes, and torch warns of the gradient of a result.
    is_counted = average.is_leaf and not average.is_inference()
    return is_counted and dtype_name(average) in _SIGNIFICANT_BITS and can_probe(average) and can_probe(parameter)


def _values(tensor: Tensor) -> Tensor:
    return sample(local_shard(tensor), MAX_ELEMENTS)


def _are_near(averages: Sequence[Tensor], parameters: NamedParameters) -> bool:
    """Return whether tensors hold about the same numbers as parameters do."""
    distance = norm = 0.0
    for average, (_, parameter) in zip(averages, parameters, strict=True):
        if _can_watch(average, parameter):
            live = _values(parameter).float()
            distance += float((_values(average).to(live) - live).square().sum())
            norm += float(live.square().sum())
    return distance < _NEAR**2 * norm


def _unit_in_last_place(values: Tensor) -> Tensor:
    _, exponent = torch.frexp(values.float())
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - _SIGNIFICANT_BITS[dtype_name(values)])
