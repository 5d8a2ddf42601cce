"""The real code of a backend as rank 0 of any number of ranks, in one process whose collectives do nothing.

Every cell has a process of its own (`benchbox.worker.simulated_ranks`), because the process group and accelerate's state are
global.

FSDP2 and HSDP run on fake tensors, so that a policy of any size needs no memory. The others run on real tensors, and the whole
policy before they shard it: DDP reads addresses of gradients in C++, which fake tensors do not have, and FSDP1 and DeepSpeed
have not been tried with fake ones.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchbox.backends.deferred import take_deferred_weights
from benchbox.estimation.fake import make_fake, make_fake_batch, new_fake_mode
from benchbox.estimation.groups import fake_process_group
from benchbox.estimation.tracing import list_tensors
from benchbox.observer.hooks.collectives import CollectiveCounter
from benchbox.observer.introspect.tensors import local_shard
from benchbox.optim import freeze
from benchbox.registry.backends import backend_info
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.session.build import build_cell_policy, build_session, open_cell_data, prepare_session
from benchbox.session.host_memory import check_host_memory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchbox.spec.cell import Cell

FAKE_TENSORS = ("fsdp2", "hsdp")


class _RankMode(TorchDispatchMode):
    """Counts collectives. With fake tensors, operations on real tensors alone run for real: masks decide what a policy runs."""

    supports_higher_order_operators = True

    def __init__(self, *, has_fakes: bool) -> None:
        super().__init__()
        self.collectives = CollectiveCounter()
        self._has_fakes = has_fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._has_fakes and not self._is_fake(func, list_tensors((*args, *kwargs.values()))):
            with _disable_current_modes():
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self.collectives.is_relevant(func):
            self.collectives.on_operation(func, args, kwargs, result)
        return result

    @staticmethod
    def _is_fake(func: Any, tensors: Sequence[Tensor]) -> bool:
        if tensors:
            return any(isinstance(tensor, FakeTensor) for tensor in tensors)
        return "empty" in func.overloadpacket.__name__  # buffers of backends; what has values is real


def simulate_rank(cell: Cell, policy_dirs: Sequence[Path]) -> dict[str, Any]:
    """Return collectives of a step and bytes of the parameters of rank 0, by running `prepare` and a step of the backend."""
    is_fake = cell.backend in FAKE_TENSORS
    policy: Any = build_cell_policy(cell, policy_dirs)
    with fake_process_group(cell.world_size), ExitStack() as stack:
        stream = stack.enter_context(closing(open_cell_data(cell, policy, 0)))
        batches = [next(iter(stream)) for _ in range(cell.accumulation)]
        counting = _RankMode(has_fakes=is_fake)
        if is_fake:
            mode = new_fake_mode()
            freeze(policy, policy.parameter_roles(), FREEZE_PRESETS[cell.freeze])
            policy.load_statistics(list(stream.statistics))
            take_deferred_weights(policy)
            make_fake(policy, mode)
            policy.to = lambda *args, **kwargs: _cast(policy, mode, *args, **kwargs)
            batches = [make_fake_batch(batch, mode) for batch in batches]
            stack.enter_context(mode)
            stack.enter_context(counting)
            session = prepare_session(cell, policy, backend_info(cell.backend).load()())
        else:
            check_host_memory(cell, policy, ranks=1)
            session = build_session(cell, policy, stream.statistics)
            stack.enter_context(counting)
        if cell.backend == "ddp":
            hook = lambda _, bucket: _all_reduced(bucket.buffer())  # noqa: E731 (DDP refuses annotations as text)
            session.model.register_comm_hook(None, hook)  # type: ignore[operator] # DDP's own
        # The first steps of some differ: DDP sets its buckets anew, and ZeRO-3 learns the order of its units.
        for _ in range(1 if is_fake else 3):
            counting.collectives = CollectiveCounter()
            session.step(batches)
        return {
            "collectives": counting.collectives.counts,
            "parameter_bytes": _parameter_bytes(session.model, cell.backend),
            "tensors": "fake" if is_fake else "real",
        }


def _parameter_bytes(model: nn.Module, backend: str) -> int:
    """Return the bytes of this rank's part of the parameters; ZeRO-1 and ZeRO-2 pad the memory in which all of them lie."""
    shards = [local_shard(parameter) for parameter in model.parameters()]
    if backend in ("zero1", "zero2"):
        return sum({shard.untyped_storage()._cdata: shard.untyped_storage().nbytes() for shard in shards}.values())  # noqa: SLF001
    return sum(shard.numel() * shard.element_size() for shard in shards)


def _cast(policy: nn.Module, mode: FakeTensorMode, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> nn.Module:
    """Cast as `Module.to` does, which cannot exchange fake tensors that others refer to. Their device is the rank's already."""
    dtype = dtype or next((value for value in args if isinstance(value, torch.dtype)), None)
    if dtype is None:
        return policy
    for module in policy.modules():
        for tensors in (module._parameters, module._buffers):  # noqa: SLF001 (they are replaced in place)
            for name, tensor in tensors.items():
                if tensor is None or tensor.dtype == dtype or not tensor.is_floating_point():
                    continue
                with mode:
                    cast: Any = torch.empty(tensor.shape, dtype=dtype, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors[name] = nn.Parameter(cast, requires_grad=tensor.requires_grad) if is_parameter else cast
    return policy


def _all_reduced(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """All-reduce a bucket as DDP does, but with a future, which the fake process group does not give to C++."""
    dist.all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future
