"""Float32 master weights for 16-bit live parameters, for backends that keep none of their own."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchbox.optim.buckets import step_in_buckets
from benchbox.optim.chunks import build_masters, flatten_chunks, granularity_of, split_into_chunks
from benchbox.optim.fused import is_plain_adam
from benchbox.optim.norm import clip_coefficient, squared_norm
from benchbox.optim.one_pass import step_in_one_pass
from benchbox.optim.state_dict import check_state_dict, group_options, pack_groups, pack_state, unpack_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.optim.buckets import ScratchBuffers
    from benchbox.optim.chunks import ParameterChunk


class MasterWeightOptimizer(Optimizer):
    """Optimizer that steps float32 masters of 16-bit parameters (Micikevicius et al., arXiv:1710.03740, section 3.1).

    Gradients of the live parameters are upcast, `inner` steps the masters with them, and the masters are rounded into the live
    parameters. Updates too small for the 16-bit weight accumulate in its master instead of being lost, and moments are float32.

        full = [parameter.detach().clone() for parameter in model.parameters()]   # float32: before the cast
        model.to(torch.bfloat16)
        optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, masters=full, lr=1e-4, fused=True)
        schedule = LambdaLR(optimizer, ...)
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    It is an `Optimizer` over the live parameters and never replaces these objects: a schedule built on it takes effect in the
    step, `zero_grad` clears the gradients that the backward pass wrote, and libraries that look for an `Optimizer` find one.
    `state` is the state of the masters; `inner` is the optimizer that steps them.

    Args:
        params: live parameters, bfloat16, float16 or float32 in any mixture, or groups of them, as for any optimizer. A float32
            parameter has a master as well: rounding into it is exact. Frozen parameters have one too; leave out parameters that
            are never trained.
        inner: the optimizer class that steps the masters; further keyword arguments are passed to it. An optimizer of
            `torch.optim` is called once for each bucket of gradients, so that their upcast takes little memory. Any other may
            depend on several tensors at once: it is called once per step, and all gradients exist in float32 during the call.
            If a C compiler is available, a fused Adam without step hooks steps large bfloat16 parameters on the CPU in one
            compiled pass instead.
        masters: float32 weights from *before* the live parameters were cast, in the order of `params`; they are used directly,
            not copied. Without them, masters are upcast from the live parameters, and the digits lost in the cast are gone.

    `state_dict` contains masters and state, so that a resumed run continues bit for bit. Masters follow a model that moves to
    another device. Gradients are used as they are: float16 gradients scaled by a `GradScaler` are not supported (torch refuses
    to unscale them), and live gradients are never scaled by a clip.

    Raises:
        TypeError: `inner` must call its closure itself (LBFGS), or a parameter is sharded or has an unsupported dtype.
        ValueError: `masters` do not fit `params`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        inner: type[Optimizer] = torch.optim.AdamW,
        *,
        masters: Sequence[Tensor] | None = None,
        **inner_arguments: Any,
    ) -> None:
        super().__init__(params, {})
        self._granularity = granularity_of(inner)
        self.masters: list[Tensor] = []
        self._chunks: list[list[list[ParameterChunk]]] = []  # by group and parameter
        count = sum(len(group["params"]) for group in self.param_groups)
        if masters is not None and len(masters) != count:
            raise ValueError(f"{len(masters)} masters for {count} parameters")
        remaining = None if masters is None else iter(masters)
        for group in self.param_groups:
            self._add_masters(group, None if remaining is None else list(islice(remaining, len(group["params"]))))
        self.inner = inner([self._inner_group(index) for index in range(len(self.param_groups))], **inner_arguments)
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        self._copy_inner_options()
        self._divisor: Tensor | None = None
        self._scratch: ScratchBuffers = {}

    def _add_masters(self, group: dict[str, Any], masters: Sequence[Tensor] | None) -> None:
        """Append the masters of the next group, and the chunks in which they are stepped."""
        parameters = group["params"]
        masters = build_masters(parameters, masters)
        self.masters += masters
        self._chunks.append([split_into_chunks(*pair, self._granularity) for pair in zip(parameters, masters, strict=True)])

    def _inner_group(self, index: int) -> dict[str, Any]:
        return {**self.param_groups[index], "params": [chunk.master for chunk in chain(*self._chunks[index])]}

    def stepped(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over (live parameter, tensor that the inner optimizer steps for it or for its next chunk)."""
        for chunk in flatten_chunks(self._chunks):
            yield chunk.parameter, chunk.master

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Return the global norm of the live gradients, () float32, and have the next `step` scale it to at most `max_norm`.

        The scaling happens after the upcast, where it is exact; scaling 16-bit gradients in place would round each of them a
        second time. `zero_grad` cancels it. As with `torch.nn.utils.clip_grad_norm_`, a non-finite norm is returned as it is,
        and a step would propagate it into the weights: check the norm before the step to skip such a step.
        """
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = squared_norm(gradients, gradients[0].device if gradients else torch.device("cpu")).sqrt()
        self._divisor = clip_coefficient(norm, max_norm).reciprocal()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the live gradients and cancel the pending clip."""
        super().zero_grad(set_to_none)
        self._divisor = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Upcast gradients, scale them by the pending clip, step the masters, round them into the live parameters.

        Args:
            closure: evaluates the model once, with gradients; its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._has_moved():
            state_dict = self._build_state_dict()
            self._move_masters()
            self._load(state_dict | {"masters": self.masters})
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update(group_options(group))
        remaining: list[Iterable[ParameterChunk]] = [chain(*chunks) for chunks in self._chunks]
        try:
            if is_plain_adam(self.inner):
                remaining = [
                    step_in_one_pass(self.inner, inner_group, chunks, self._divisor)
                    for inner_group, chunks in zip(self.inner.param_groups, remaining, strict=True)
                ]
            step_in_buckets(self.inner, remaining, self._granularity, self._divisor, self._scratch)
        finally:
            self._divisor = None
        self._copy_inner_options()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add live parameters, with `masters` among the options or upcast from them."""
        group = dict(param_group)
        masters = group.pop("masters", None)
        super().add_param_group(group)
        if hasattr(self, "inner"):
            try:
                self._add_masters(group, masters)
            except (TypeError, ValueError):
                self.param_groups.pop()
                raise
            self.inner.add_param_group(self._inner_group(-1))
            self._copy_inner_options()

    def _copy_inner_options(self) -> None:
        """Copy the inner optimizer's hyperparameters into our groups, where schedules look for them."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(group_options(inner_group))

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups in the format of an optimizer over the live parameters, and the masters, in order."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._build_state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def _build_state_dict(self) -> dict[str, Any]:
        state = pack_state(list(chain(*self._chunks)), self.inner.state)
        return {"state": state, "param_groups": pack_groups(self.param_groups), "masters": list(self.masters)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and state bit for bit, and round the masters into the live parameters.

        Tensors are copied one after another, from any device and from a mapped file: no second copy of masters or state is
        made, unless the caller holds on to the previous state.

        Raises:
            KeyError: there are no masters. Deriving them from 16-bit weights would lose the digits they exist to keep.
            ValueError: it belongs to other parameters.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        check_state_dict(state_dict, self.param_groups)
        self._load(state_dict)
        self._divisor = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _has_moved(self) -> bool:
        return any(chunk.master.device != chunk.parameter.device for chunk in flatten_chunks(self._chunks))

    def _move_masters(self) -> None:
        """Move the masters to the devices of the live parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        moved = iter([master.to(parameter.device) for master, parameter in zip(self.masters, parameters, strict=True)])
        self.masters, self._chunks, self._scratch = [], [], {}
        for index, group in enumerate(self.param_groups):
            self._add_masters(group, list(islice(moved, len(group["params"]))))
            self.inner.param_groups[index]["params"] = self._inner_group(index)["params"]

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        if self._has_moved():
            self._move_masters()
        for master, saved_master in zip(self.masters, state_dict["masters"], strict=True):
            master.copy_(saved_master)
        self.inner.state.clear()  # before the new state is made, so that the device never holds both
        state = unpack_state(list(chain(*self._chunks)), state_dict["state"])
        group_pairs = zip(state_dict["param_groups"], pack_groups(self.inner.param_groups), strict=True)
        groups = [{**saved_group, "params": inner_group["params"]} for saved_group, inner_group in group_pairs]
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.inner.state
        self._copy_inner_options()
        self.round_into_live()

    @torch.no_grad()
    def round_into_live(self) -> None:
        """Round the masters into the live parameters, after the masters were written."""
        for chunk in flatten_chunks(self._chunks):
            chunk.round_into_live()

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: vars(self)[name] for name in ("masters", "inner", "_granularity", "_chunks", "_divisor")}
        return super().__getstate__() | attributes | {"_scratch": {}}
