"""Agreement of all ranks on the step after which a training stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work


def never_stop() -> bool:
    """Return False: the request of a training that nothing stops."""
    return False


class AgreedStop:
    """Agreement of all ranks on whether to stop.

    The ranks reduce their requests after every step and before every batch of a validation, on the CPU, and read the result one
    step or batch later: nothing waits for the device, and by then the result has usually arrived. They therefore stop one step
    or batch after the request was sent.

    Args:
        requested: whether this rank was asked to stop.
        group: from `cpu_group`.
    """

    def __init__(self, requested: Callable[[], bool], group: ProcessGroup | None) -> None:
        self._requested = requested
        self._group = group
        self._flag = torch.zeros((), dtype=torch.uint8)
        self._work: Work | None = None

    def agreed(self) -> bool:
        """Return whether to stop now: the same on every rank. All ranks must call it after the same steps."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self._requested()
        stopping = False
        if self._work is not None:
            self._work.wait()
            stopping = bool(self._flag)
        self._flag = torch.tensor(self._requested(), dtype=torch.uint8)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return stopping

    def close(self) -> None:
        """Wait for the reduction that is under way, before the process group is destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def cpu_group() -> ProcessGroup | None:
    """Return a process group of all ranks that reduces tensors on the CPU; None is the default group, if that one does.

    All ranks must call it.
    """
    if not dist.is_initialized() or "cpu:gloo" in dist.get_backend_config():
        return None
    group: ProcessGroup = dist.new_group(backend="gloo")
    return group
