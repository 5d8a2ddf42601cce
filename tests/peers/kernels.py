"""The matrix products, convolutions and attention of a training step, without everything between them.

Their time is what a step takes at least, whatever calls these kernels on these tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from benchbox.measure.flops import FlopCounter
from benchbox.measure.phases import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from benchbox.measure.phases import Instrument


class StepKernels:
    """Keeps the calls in a step that have a formula of FLOPs, with their tensors. Listens to its operations and phases."""

    is_relevant = staticmethod(FlopCounter.is_relevant)

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {}
        self._phase = ""

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._calls.setdefault(self._phase, []).append((operation, args, kwargs))

    def step(self) -> AbstractContextManager[None]:
        return NONE.step()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        yield

    @torch.no_grad()
    def repeat(self, instrument: Instrument) -> None:
        """Call the kernels once more, phase by phase, on the tensors that they had."""
        with instrument.step():
            for name, calls in self._calls.items():
                with instrument.phase(name):
                    for operation, args, kwargs in calls:
                        operation(*args, **kwargs)
