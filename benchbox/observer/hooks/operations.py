"""Recording of every operation of one step: its collectives and matrix products."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .collectives import CollectiveCounter
from .dispatch import OperationDispatchMode, in_backward
from .matmuls import MatmulDtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_RECORDED = "no step was watched operation by operation"


class OperationRecorder:
    """Records operations from inside one step to inside the next, so that one complete cycle is covered.

    `missing` is the reason why nothing was recorded, None once something was.

    Args:
        collectives, matmuls: counters of a caller who records the operations of a step; nothing is then recorded here.
    """

    def __init__(self, collectives: CollectiveCounter | None = None, matmuls: MatmulDtypes | None = None) -> None:
        self.by_caller = collectives is not None and matmuls is not None
        self.collectives, self.matmuls = collectives or CollectiveCounter(), matmuls or MatmulDtypes()
        self.missing: str | None = None if self.by_caller else _NOT_RECORDED
        self._mode: OperationDispatchMode | None = None
        self._failure: Exception | None = None
        self._steps_in_backward = False
        self._threads: set[int] = set()  # those that step optimizers

    def note_call(self) -> None:
        """Note where the program steps an optimizer."""
        self._steps_in_backward |= in_backward()
        self._threads.add(threading.get_ident())

    def enter(self) -> None:
        """Start recording, unless that was done before or would disturb the training."""
        if self._mode is not None or self.missing != _NOT_RECORDED:
            return
        if self._steps_in_backward:
            # Autograd restores the modes of the forward pass when the backward pass ends: this one would get lost, or stay.
            self.missing = "the training steps its optimizers inside the backward pass"
            return
        if len(self._threads) > 1:
            self.missing = "the training steps its optimizers in several threads"  # and each has its own modes
            return
        if (conflict := _conflict()) is not None:
            self.missing = conflict
            return
        self._mode = OperationDispatchMode(*(_Guarded(self, listener) for listener in (self.collectives, self.matmuls)))
        self._mode.__enter__()

    def note_failure(self, error: Exception) -> None:
        """Note an exception of the recording, inside an operation of the training. From then on nothing is recorded."""
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the exception that was noted, outside of the training's operations, where the mode can be left."""
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Stop recording. If the program is inside a dispatch mode that it entered later, stop at the next call instead."""
        if self._mode is None:
            return
        if _get_current_dispatch_mode() is not self._mode:
            self.missing = (
                "the training entered a dispatch mode of its own, or went on in another thread, while operations were watched"
            )
            return
        self._mode.__exit__(None, None, None)
        self._mode = None
        if self.missing == _NOT_RECORDED:
            self.missing = None


class _Guarded:
    """Listener that receives operations until one of them makes it fail."""

    def __init__(self, recorder: OperationRecorder, listener: CollectiveCounter | MatmulDtypes) -> None:
        self._recorder, self._listener = recorder, listener

    def is_relevant(self, operation: Any) -> bool:
        try:
            return self._listener.is_relevant(operation)
        except Exception as error:  # noqa: BLE001 (no error of the observer may reach the training)
            self._recorder.note_failure(error)
            return False

    def on_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._recorder.has_failed:
            return
        try:
            self._listener.on_operation(operation, args, kwargs, result)
        except Exception as error:  # noqa: BLE001 (no error of the observer may reach the training)
            self._recorder.note_failure(error)


def _conflict() -> str | None:
    """Return why a dispatch mode would change what this process runs, or make it fail; None if it would not."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["stats"].get("unique_graphs"):
        # A dispatch mode would make compiled regions run uncompiled, which may change the last bits of results.
        return "the training compiles its model: watching single operations would change what runs"
    if _get_current_dispatch_mode() is not None:
        # The program will leave its mode before this one, but modes can only be left in reverse order.
        return "the training steps its optimizer inside a dispatch mode of its own"
    if not _can_cast_to_subclasses() and (names := sorted(_foreign_subclasses(torch.Tensor))):
        return f"under torch {torch.__version__} watching operations breaks subclasses of Tensor ({names[0]})"
    return None


class _Subclass(torch.Tensor):
    pass


def _can_cast_to_subclasses() -> bool:
    """Return whether a tensor can be cast to a subclass under a dispatch mode: torch 2.4 cannot."""
    with OperationDispatchMode():
        try:
            torch.zeros(()).as_subclass(_Subclass)
        except RuntimeError:
            return False
    return True


def _foreign_subclasses(kind: type[Any]) -> Iterator[str]:
    """Yield the names of all subclasses of Tensor that are not torch's own."""
    for subclass in kind.__subclasses__():
        if subclass is not _Subclass and not subclass.__module__.startswith("torch."):
            yield subclass.__qualname__
        yield from _foreign_subclasses(subclass)
