"""Patches of torch functions that hooks do not reach: backward, gradient clipping, loss scaling, loading optimizer state.

Each function is replaced by a wrapper that calls the original with the same arguments and returns its result.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..facts import StateLoad
from ..introspect.tensors import dtype_name
from .clips import Clip, PendingClips
from .loss_scale import LossScaleWatch
from .patches import FunctionPatches
from .tracing import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .guard import FailureGuard

# Scripts repeat these calls; more records of them add nothing.
_MAX_RECORDS = 64


class PatchedCalls:
    """Records of clipping, loss scaling and loaded optimizer state while the patches are installed.

    Args:
        guard: of the recording, but not of the original functions.
        on_backward: called after each backward pass.
    """

    def __init__(self, guard: FailureGuard, on_backward: Callable[[], None]) -> None:
        self._guard, self._on_backward = guard, on_backward
        self.loads: list[StateLoad] = []
        self.scaler: str | None = None
        self.scaled_steps = 0
        self.steps_taken = 0  # by optimizers, as the observer counts them
        self.skipped = 0
        self.loss_scale = LossScaleWatch(guard)  # of the script itself
        self.clips = PendingClips()
        self._patches = FunctionPatches()
        self._has_other_norm = False  # the latest total norm is none of squares

    def install(self) -> None:
        """Replace the functions."""
        self._patches = FunctionPatches()
        for owner in (torch.nn.utils, clip_grad):
            self._patches.patch(owner, "clip_grad_norm_", self._record_clip)
        if hasattr(torch.nn.utils, "clip_grads_with_norm_"):  # the two halves of clip_grad_norm_, since torch 2.6
            self._patches.patch(torch.nn.utils, "get_total_norm", self._record_total_norm)
            self._patches.patch(torch.nn.utils, "clip_grads_with_norm_", self._record_clip_with_norm)
        self._patches.patch(torch.autograd, "backward", self._record_backward)
        self._patches.patch(Optimizer, "load_state_dict", self._record_load)
        self._patches.patch(torch.amp.GradScaler, "step", self._record_scaled_step)
        self._patches.patch(torch.amp.GradScaler, "unscale_", self._record_unscaling)
        self.patch_fsdp1()

    def patch_fsdp1(self) -> None:
        """Replace FSDP1's own methods of clipping and of unscaling, once the script has imported FSDP1."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        fsdp1 = getattr(fsdp, "FullyShardedDataParallel", None)
        if fsdp1 is not None and not self._patches.has(fsdp1):
            self._patches.patch(fsdp1, "clip_grad_norm_", self._record_clip)
        scaler = getattr(sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler"), "ShardedGradScaler", None)
        if scaler is not None and not self._patches.has(scaler):
            self._patches.patch(scaler, "unscale_", self._record_unscaling)

    def remove(self) -> None:
        """Restore the functions."""
        self._patches.remove()

    def _record_backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            gradient = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
            self.loss_scale.watch(args[0] if args else kwargs["tensors"], gradient)
        result = original(*args, **kwargs)
        self._on_backward()
        return result

    def _record_clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = args[0] if args else kwargs.get("parameters")
        if isinstance(parameters, Iterator):  # it can be consumed only once
            parameters = list(parameters)
            args, kwargs = ((parameters, *args[1:]), kwargs) if args else (args, kwargs | {"parameters": parameters})
        norm = original(*args, **kwargs)
        with self._guard:
            arguments = dict(zip(("parameters", "max_norm", "norm_type"), args)) | kwargs  # noqa: B905 (the call has more)
            if float(arguments.get("norm_type", 2.0)) == 2.0 and not is_capturing():
                self.clips.add(Clip(norm, float(arguments["max_norm"])), _parameter_ids(parameters))
        return norm

    def _record_total_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            self._has_other_norm = float(args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)) != 2.0
        return original(*args, **kwargs)

    def _record_clip_with_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = args[0] if args else kwargs.get("parameters")
        if isinstance(parameters, Iterator):
            parameters = list(parameters)
            args, kwargs = ((parameters, *args[1:]), kwargs) if args else (args, kwargs | {"parameters": parameters})
        result = original(*args, **kwargs)
        with self._guard:
            arguments = dict(zip(("parameters", "max_norm", "total_norm"), args)) | kwargs  # noqa: B905 (the call has more)
            if not self._has_other_norm and not is_capturing():
                self.clips.add(Clip(arguments["total_norm"], float(arguments["max_norm"])), _parameter_ids(parameters))
            self._has_other_norm = False
        return result

    def _record_unscaling(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            if scaler.is_enabled():
                for clip in self.clips.of(_parameter_ids(optimizer)):
                    clip.scale = scaler.get_scale()
        return original(scaler, optimizer, *args, **kwargs)

    def _record_scaled_step(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.steps_taken
        result = original(scaler, *args, **kwargs)
        with self._guard:
            if scaler.is_enabled():
                optimizer = args[0] if args else kwargs.get("optimizer")
                self.scaler = type(scaler).__name__
                self.scaled_steps += 1
                self.skipped += _overflowed(scaler, optimizer)
                if self.steps_taken == before:
                    self.clips.pop(_parameter_ids(optimizer))
        return result

    def _record_load(self, original: Any, optimizer: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        is_recorded = False
        with self._guard:
            if len(self.loads) < _MAX_RECORDS and "state" in state_dict:
                given, before = _state_dtypes(state_dict["state"]), _state_dtypes(optimizer.state)
                is_recorded = True
        result = original(optimizer, state_dict, *args, **kwargs)
        with self._guard:
            if is_recorded:
                held = _state_dtypes(optimizer.state)
                self.loads.append(StateLoad(optimizer=type(optimizer).__name__, given=given, held=held, before=before))
        return result


def _overflowed(scaler: Any, optimizer: Any) -> bool:
    """Return whether the gradients of a scaler's latest step overflowed.

    Whether the optimizer was called says less: a fused one is called, and skips the step itself; a compiled one cannot be seen.
    """
    by_device = scaler._found_inf_per_device(optimizer)  # noqa: SLF001 (no public name)
    return any(bool(has_overflowed) for has_overflowed in by_device.values())


def _parameter_ids(owner: Any) -> list[int]:
    """Return the ids of parameters: of one, of several, of those of a module (FSDP1 clips itself) or of an optimizer."""
    if isinstance(owner, torch.Tensor):
        return [id(owner)]
    if isinstance(owner, torch.nn.Module):
        return [id(parameter) for parameter in owner.parameters()]
    if (groups := getattr(owner, "param_groups", None)) is not None:
        return [id(parameter) for group in groups for parameter in group["params"]]
    return [id(parameter) for parameter in owner] if isinstance(owner, Collection) else []


def _state_dtypes(optimizer_state: Mapping[Any, Any]) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of an optimizer's state tensors by name."""
    dtypes: dict[str, set[str]] = {}
    for tensor_state in optimizer_state.values():
        if isinstance(tensor_state, dict):
            for name, value in tensor_state.items():
                if isinstance(value, torch.Tensor):
                    dtypes.setdefault(str(name), set()).add(dtype_name(value))
    return {name: tuple(sorted(names)) for name, names in dtypes.items()}
