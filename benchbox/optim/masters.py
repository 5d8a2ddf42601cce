"""Float32 master weights for 16-bit live parameters, for backends that keep none of their own."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchbox.optim.chunks import Grain, buckets, flat, grain_of, masters_of, pieces_of
from benchbox.optim.fused import fused_step, is_plain, steps_fused
from benchbox.optim.norm import clip_coefficient, squared_norm
from benchbox.optim.one_pass import step_in_one_pass
from benchbox.optim.saved import check_fits, numbered, options_of, packed_state, unpacked_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.optim.chunks import Held, Piece


class MasterWeightOptimizer(Optimizer):
    """Mixed-precision training as in Micikevicius et al. (arXiv:1710.03740, section 3.1): gradients of 16-bit live parameters
    are upcast, `inner` steps float32 masters with them, and the masters are rounded into the live parameters. Updates too small
    for the 16-bit weight add up in its master instead of being lost, and moments are float32.

        full = [parameter.detach().clone() for parameter in model.parameters()]   # float32: before the cast
        model.to(torch.bfloat16)
        optimizer = MasterWeightOptimizer(model.parameters(), torch.optim.AdamW, masters=full, lr=1e-4, fused=True)
        schedule = LambdaLR(optimizer, ...)
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    It is an `Optimizer` over the live parameters, which stay the objects they are: a schedule built on it reaches the step,
    `zero_grad` clears the gradients that the backward pass wrote, and libraries that look for an `Optimizer` find one. `state`
    is that of the masters; `inner` is the optimizer that steps them.

    Args:
        params: live parameters, bfloat16, float16 or float32 in any mixture, or groups of them, as for any optimizer. A float32
            parameter has a master as well: rounding into it is exact. So have frozen ones; leave out what is never trained.
        inner: the optimizer class that steps the masters; further keyword arguments go to it. An optimizer of `torch.optim` is
            called once for each bucket of gradients, so that their upcast takes little memory. Any other may look at several
            tensors at once: it is called once a step, and all gradients exist in float32 for that long. Where a C compiler is
            found, a fused Adam that nobody hooks steps large bfloat16 parameters on the CPU in one compiled pass instead.
        masters: float32 weights from *before* the live parameters were cast, in the order of `params`; they are taken over, not
            copied. Without them masters are upcast from the live parameters, and what the cast rounded away is gone.

    `state_dict` holds masters and state, so that a resumed run continues bit for bit. Masters follow a model that moves to
    another device. Gradients are taken as they are: float16 ones scaled by a `GradScaler` are not supported (torch refuses to
    unscale them), and live gradients are never scaled by a clip.

    Raises:
        TypeError: `inner` must call its closure itself (LBFGS), or a parameter is sharded or of another dtype.
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
        self._grain = grain_of(inner)
        self.masters: list[Tensor] = []
        self._pieces: list[list[list[Piece]]] = []  # by group and parameter
        count = sum(len(group["params"]) for group in self.param_groups)
        if masters is not None and len(masters) != count:
            raise ValueError(f"{len(masters)} masters for {count} parameters")
        remaining = None if masters is None else iter(masters)
        for group in self.param_groups:
            self._adopt(group, None if remaining is None else list(islice(remaining, len(group["params"]))))
        self.inner = inner([self._inner_group(index) for index in range(len(self.param_groups))], **inner_arguments)
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        self._take_options()
        self._divisor: Tensor | None = None
        self._scratch: dict[torch.device, Tensor] = {}

    def _adopt(self, group: dict[str, Any], masters: Sequence[Tensor] | None) -> None:
        """Keep masters of the next group, and the pieces they are stepped in."""
        kept = masters_of(group["params"], masters)
        self.masters += kept
        self._pieces.append([pieces_of(*pair, self._grain) for pair in zip(group["params"], kept, strict=True)])

    def _inner_group(self, index: int) -> dict[str, Any]:
        return {**self.param_groups[index], "params": [piece.master for piece in chain(*self._pieces[index])]}

    def stepped(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(live parameter, tensor that the inner optimizer steps for it or for the next part of it)."""
        for piece in flat(self._pieces):
            yield piece.parameter, piece.master

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The global norm of the live gradients, () float32, which the next `step` scales to at most `max_norm`.

        The scaling happens after the upcast, where it is exact; scaling 16-bit gradients in place would round every one of them
        a second time. It is forgotten by `zero_grad`. As with `torch.nn.utils.clip_grad_norm_`, a norm that is not finite is
        returned as it is, and a step would carry it into the weights: whoever wants to leave the step out looks at it first.
        """
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = squared_norm(gradients, gradients[0].device if gradients else torch.device("cpu")).sqrt()
        self._divisor = clip_coefficient(norm, max_norm).reciprocal()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the live gradients, and the clip that was to scale them."""
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
            saved = self._saved()
            self._follow()
            self._restore(saved | {"masters": self.masters})
        groups = self.inner.param_groups
        whole = [group["params"] for group in groups]
        for group, inner_group in zip(self.param_groups, groups, strict=True):
            inner_group.update(options_of(group))
        remaining: list[Iterable[Piece]] = [chain(*pieces) for pieces in self._pieces]
        try:
            if is_plain(self.inner):
                remaining = [step_in_one_pass(self.inner, *one, self._divisor) for one in zip(groups, remaining, strict=True)]
            for bucket in buckets(remaining, self._grain):
                for index, held in bucket.items():
                    groups[index]["params"] = [piece.master for piece, _ in held]
                self.inner.param_groups = [groups[index] for index in bucket]
                self._step_bucket(list(chain(*bucket.values())))
        finally:
            self.inner.param_groups = groups
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            self._divisor = None
        self._take_options()
        return loss

    def _step_bucket(self, held: Held) -> None:
        upcasts = self._upcasts(held)
        try:
            for (piece, gradient), upcast in zip(held, upcasts, strict=True):
                piece.master.grad = upcast.copy_(gradient)
            divisor = None if self._divisor is None else self._divisor.to(upcasts[0].device)
            if steps_fused(self.inner):
                fused_step(self.inner, divisor)
            else:
                if divisor is not None:
                    torch._foreach_div_(upcasts, divisor)
                self.inner.step()
        finally:
            for piece, _ in held:
                piece.master.grad = None
        for piece, _ in held:
            piece.round_into_live()

    def _upcasts(self, held: Held) -> list[Tensor]:
        """Where the gradients of a bucket go: float32, in the shapes of the masters."""
        if self._grain is Grain.ALL:
            return [torch.empty_like(piece.master) for piece, _ in held]
        device, sizes = held[0][0].master.device, [piece.master.numel() for piece, _ in held]
        scratch = self._scratch.get(device)
        if scratch is None or scratch.numel() < sum(sizes):
            scratch = self._scratch[device] = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        parts = scratch[: sum(sizes)].split(sizes)
        return [part.view(piece.master.shape) for part, (piece, _) in zip(parts, held, strict=True)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add live parameters, with `masters` among the options or upcast from them."""
        group = dict(param_group)
        masters = group.pop("masters", None)
        super().add_param_group(group)
        if hasattr(self, "inner"):
            try:
                self._adopt(group, masters)
            except (TypeError, ValueError):
                self.param_groups.pop()
                raise
            self.inner.add_param_group(self._inner_group(-1))
            self._take_options()

    def _take_options(self) -> None:
        """Show the inner optimizer's hyperparameters in our groups, where schedules look for them."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(options_of(inner_group))

    def state_dict(self) -> dict[str, Any]:
        """State and groups as any optimizer over the live parameters has them, and the masters, in order."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved = self._saved()
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def _saved(self) -> dict[str, Any]:
        state = packed_state(list(chain(*self._pieces)), self.inner.state)
        return {"state": state, "param_groups": numbered(self.param_groups), "masters": list(self.masters)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and state bit for bit, and round the masters into the live parameters.

        Raises:
            KeyError: the dictionary holds no masters. Deriving them from 16-bit weights would lose what they exist to keep.
            ValueError: it is of other parameters.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            saved = before(self, saved) or saved
        check_fits(saved, self.param_groups)
        self._restore(saved)
        self._divisor = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _has_moved(self) -> bool:
        return any(piece.master.device != piece.parameter.device for piece in flat(self._pieces))

    def _follow(self) -> None:
        """Take the masters to where the live parameters are now."""
        live = [parameter for group in self.param_groups for parameter in group["params"]]
        moved = iter([master.to(parameter.device) for master, parameter in zip(self.masters, live, strict=True)])
        self.masters, self._pieces, self._scratch = [], [], {}
        for index, group in enumerate(self.param_groups):
            self._adopt(group, list(islice(moved, len(group["params"]))))
            self.inner.param_groups[index]["params"] = self._inner_group(index)["params"]

    @torch.no_grad()
    def _restore(self, saved: dict[str, Any]) -> None:
        if self._has_moved():
            self._follow()
        for master, stored in zip(self.masters, saved["masters"], strict=True):
            master.copy_(stored)
        state = unpacked_state(list(chain(*self._pieces)), saved["state"])
        groups = zip(saved["param_groups"], numbered(self.inner.param_groups), strict=True)
        own = [{**group, "params": pieces["params"]} for group, pieces in groups]
        self.inner.load_state_dict({"state": state, "param_groups": own})
        self.state = self.inner.state
        self._take_options()
        for piece in flat(self._pieces):
            piece.round_into_live()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: vars(self)[name] for name in ("masters", "inner", "_grain", "_pieces", "_divisor")}
        return super().__getstate__() | own | {"_scratch": {}}
