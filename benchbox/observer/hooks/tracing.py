"""Hooks under torch.compile and under CUDA graphs: both record a program with its hooks, and run it again without them.

torch.compile traces whatever a compiled frame calls. A traced hook must do nothing: an effect would break the graph, and the
training would round differently. Dynamo also guards on the hooks that it met. A traced hook therefore stays registered, idle,
when the observer is done: without it every graph would be compiled again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_counts: Counter[str] = Counter()  # traces by kind of hook, in this process


class TraceWatch:
    """Tells whether torch.compile has traced hooks of this kind since this object was made: step, forward or call."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._before = _counts[kind]

    def __bool__(self) -> bool:
        return _counts[self._kind] > self._before


def is_capturing() -> bool:
    """Return whether this thread captures a CUDA graph: reading a number would end the capture, and with it the training."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Dynamo runs a function that is passed to `comptime` while it traces, and leaves no trace of the call in the graph. It accepts
# plain functions only. The import is there already: torch.compile is running.


def note_traced_step() -> None:
    """Note that an optimizer's step is compiled. To be called only if `torch.compiler.is_compiling()`."""
    from torch._dynamo.comptime import comptime

    comptime(_count_step)


def note_traced_forward() -> None:
    """Note that a module's forward is compiled. To be called only if `torch.compiler.is_compiling()`."""
    from torch._dynamo.comptime import comptime

    comptime(_count_forward)


def note_traced_call() -> None:
    """Note that a call of a patched function is compiled. To be called only if `torch.compiler.is_compiling()`."""
    from torch._dynamo.comptime import comptime

    comptime(_count_call)


def _count_step(_: Any) -> None:
    _counts["step"] += 1


def _count_forward(_: Any) -> None:
    _counts["forward"] += 1


def _count_call(_: Any) -> None:
    _counts["call"] += 1
