"""Gradients that a step reads: which clipping was meant for them, and whether they change after they were looked at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .hooks.clips import Clip
from .introspect.tensors import is_of_package, local_norm
from .state import StepNorm

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.optim import Optimizer

    from .hooks.steps import SteppedTensors
    from .state import ObserverState, StepObservation

# Of a norm that is computed again: gradients that really change, change by more.
_UNCHANGED = 1e-6
# The package of optimizers that use gradients as scratch memory after they have read them.
_OVERWRITES_GRADIENTS = "optimi"


class GradientRecorder:
    """Records the clippings that act on each step, and gradients that are not those which the update is computed from."""

    def __init__(self, state: ObserverState) -> None:
        self._state = state
        self._versions: dict[int, tuple[int, int]] = {}  # by id of the stepped tensor: identity and version of its gradient
        self._unattributed: Clip | None = None
        self._unread: tuple[Clip, int] | None = None  # of so many tensors that nobody steps
        self._is_first_call = False  # of this step

    def begin_step(self) -> None:
        """Begin a step."""
        self._unattributed = self._unread = None
        self._is_first_call = True

    def before_call(self, optimizer: Optimizer, tensors: SteppedTensors) -> None:
        """Attribute clippings to the tensors that they clipped, which are about to be stepped."""
        observation = self._state.steps[-1]
        if self._state.calls.clips:
            for _, _, tensor in tensors:
                self._attribute(observation, tensor)
        if self._state.calls.clips or self._unattributed is not None:
            self._attribute_to_unlinked(observation, tensors)
        if self._state.optimizers[id(optimizer)].probed_step != observation.step:
            return
        if self._is_first_call and self._state.calls.clips and not observation.clips:
            self._unread = self._unread_clip()
        self._is_first_call = False
        self._versions = {id(tensor): _version(tensor.grad) for _, _, tensor in tensors}
        if (scale := _scale_in_step(optimizer)) is not None:
            reason = f"{type(optimizer).__name__} divides the gradients by the loss scale inside its step"
            observation.changed_gradients |= {id(tensor): reason for _, _, tensor in tensors}
            for clip in observation.clips_of(id(tensor) for _, _, tensor in tensors):
                clip.scale = scale if scale != 1.0 else None

    def after_call(self, optimizer: Optimizer, tensors: SteppedTensors, closure_calls: int) -> None:
        """Record the gradients that changed inside the step."""
        observation = self._state.steps[-1]
        clips = self._state.calls.clips
        is_probed = self._state.optimizers[id(optimizer)].probed_step == observation.step
        if not (is_probed or clips):
            return
        name = type(optimizer).__name__
        is_scratch = is_of_package(optimizer, _OVERWRITES_GRADIENTS) or _is_nesterov(optimizer)
        for _, _, tensor in tensors:
            clips_inside = clips.pop(self._state.covered_ids(id(tensor))) if clips else []
            if not is_probed:
                continue
            for clip in clips_inside:
                observation.clips.setdefault(clip, set()).add(id(tensor))
            if closure_calls > 1:
                reason = f"{name} calls its closure {closure_calls} times in a step, each time with other gradients"
                observation.changed_gradients[id(tensor)] = reason
            elif clips_inside or (not is_scratch and self._has_changed(tensor)):
                observation.changed_gradients.setdefault(id(tensor), f"{name} changes gradients inside its step")
        self._versions = {}

    def end_step(self) -> None:
        """Compute the norm of the gradients that were stepped, where they were probed."""
        observation = self._state.steps[-1]
        if not observation.probed:
            return
        if self._unread is not None and not observation.clips:
            clip, tensors = self._unread
            if tensors >= len(observation.stepped):  # it can only have been meant for these
                observation.clips[clip] = set(observation.stepped)
        clips: dict[Clip, set[int]] = observation.clips
        if observation.reported is not None:
            clips = {Clip(*observation.reported): next(iter(clips.values())) if len(clips) == 1 else observation.stepped}
        norms = [StepNorm(clip, self._stepped_norm(observation, tensor_ids)) for clip, tensor_ids in clips.items()]
        unclipped = [] if norms else [StepNorm(None, self._stepped_norm(observation, observation.stepped))]
        observation.norm = max(norms + unclipped, key=lambda norm: norm.excess)

    def _stepped_norm(self, observation: StepObservation, tensor_ids: Collection[int]) -> float | None:
        if not observation.probed.issuperset(tensor_ids):
            return None
        probed = [tensor_id for tensor_id in tensor_ids if tensor_id in self._state.probes]
        if not probed or any(tensor_id in observation.changed_gradients for tensor_id in probed):
            return None
        return math.sqrt(math.fsum(self._state.probes[tensor_id].gradient_squared or 0.0 for tensor_id in probed))

    def _attribute(self, observation: StepObservation, tensor: Tensor) -> None:
        """Attribute to a tensor the clipping of itself, or else of all parameters that it stands for."""
        clips = self._state.calls.clips
        stands_for = self._state.covered_ids(id(tensor)) - {id(tensor)}
        is_own = id(tensor) in clips
        is_whole = is_own or all(tensor_id in clips for tensor_id in stands_for)
        attributed = clips.pop([id(tensor)]) if is_own else clips.pop(stands_for)
        for clip in attributed:
            clipped = observation.clips.setdefault(clip, set())
            if is_whole and len(attributed) == 1:  # else its norm says nothing about that of the clipped part
                clipped.add(id(tensor))

    def _attribute_to_unlinked(self, observation: StepObservation, tensors: SteppedTensors) -> None:
        """Attribute a single clipping of other tensors to those of which nobody knows what they stand for."""
        unlinked = {id(tensor) for _, _, tensor in tensors if self._state.is_unlinked(tensor)}
        if unlinked and len(pending := self._state.calls.clips.pop_all()) == 1:
            self._unattributed = pending[0]
        if unlinked and self._unattributed is not None:
            observation.clips.setdefault(self._unattributed, set()).update(unlinked)

    def _unread_clip(self) -> tuple[Clip, int] | None:
        """Return a clipping of tensors that no optimizer and no model holds, such as an old copy of it, with their number."""
        optimized = self._state.optimized_ids()
        return next(
            (
                (clip, len(tensor_ids))
                for clip, tensor_ids in self._state.calls.clips.pending().items()
                if tensor_ids.isdisjoint(optimized) and tensor_ids.isdisjoint(self._state.live_names)
            ),
            None,
        )

    def _has_changed(self, tensor: Tensor) -> bool:
        """Return whether the gradient is another one than before the step. Fused steps count as changing it, and do not."""
        version, probe = self._versions.get(id(tensor)), self._state.probes.get(id(tensor))
        if version is None or probe is None or probe.gradient_squared is None:
            return False
        if tensor.grad is None:
            return True
        if version == _version(tensor.grad):
            return False
        norm, before = local_norm(tensor.grad), probe.gradient_squared**0.5
        return not (math.isclose(norm, before, rel_tol=_UNCHANGED) or (math.isnan(norm) and math.isnan(before)))


def _is_nesterov(optimizer: Any) -> bool:
    """Return whether this is torch's SGD with Nesterov's momentum, and nothing but its kernels touches gradients in its step.

    Those for several tensors, which are the default on a GPU, add the momentum to the gradients in place.
    """
    is_torch = type(optimizer) is torch.optim.SGD and not optimizer._optimizer_step_pre_hooks  # noqa: SLF001 (no public name)
    return is_torch and any(group["nesterov"] for group in optimizer.param_groups)


def _version(gradient: Tensor | None) -> tuple[int, int]:
    """Return what changes if a gradient is replaced or written to. Inference tensors have no version."""
    if gradient is None:
        return 0, 0
    return id(gradient), -1 if gradient.is_inference() else gradient._version  # noqa: SLF001 (torch has no public one)


def _scale_in_step(optimizer: Any) -> float | None:
    """Return the scale that GradScaler has a fused optimizer divide the gradients by; None without one.

    Gradients that overflowed count as scaled: the optimizer will then skip the step.
    """
    scale, overflowed = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if isinstance(scale, Tensor):
        return float(scale)
    return 1.0 if isinstance(overflowed, Tensor) and bool(overflowed) else None
