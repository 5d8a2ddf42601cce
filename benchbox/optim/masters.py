"""Float32 master weights for 16-bit live parameters, for backends that keep none of their own."""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchbox.optim.norm import clip_coefficient, squared_norm
from benchbox.optim.pieces import buckets, joined, part_of, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchbox.optim.pieces import Piece

# These treat every element by itself, so a large tensor may be stepped in pieces. Any other gets its tensors whole.
_ELEMENTWISE = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


class MasterWeightOptimizer(Optimizer):
    """Steps float32 masters with `inner`, then rounds them into the live parameters.

    It is an `Optimizer` over the live parameters: a schedule built on it reaches the step, `zero_grad` clears the gradients the
    backward pass wrote, and libraries that look for an `Optimizer` find one. `state` is that of the masters.

    Args:
        params: live parameters, or groups of them, as for any optimizer.
        inner: the optimizer class that steps the masters; further keyword arguments go to it.
        masters: float32 copies made *before* the live parameters were cast, in the order of `params`; they are taken over, not
            copied. Without them masters are upcast from the live parameters, and what the cast rounded away is gone.

    `state_dict` holds masters and moments, so that a resumed run continues bit for bit.
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
        live = [parameter for group in self.param_groups for parameter in group["params"]]
        self.masters = _upcast(live) if masters is None else _checked(live, masters)
        whole = not issubclass(inner, _ELEMENTWISE)
        remaining = iter(self.masters)
        self._pieces = [
            [list(pieces_of(parameter, next(remaining), whole=whole)) for parameter in group["params"]]
            for group in self.param_groups
        ]
        self._whole = whole
        self.inner = inner(
            [
                {**group, "params": [piece.master for piece in chain(*pieces)]}
                for group, pieces in zip(self.param_groups, self._pieces, strict=True)
            ],
            **inner_arguments,
        )
        self._take_options()
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        self._scale: Tensor | None = None
        self._scratch: dict[torch.device, Tensor] = {}

    def stepped(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(live parameter, tensor that the inner optimizer steps for it or for a part of it)."""
        for piece in chain(*chain(*self._pieces)):
            yield piece.parameter, piece.master

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The global norm of the live gradients, () float32. The clipping itself happens in `step`, after the upcast, where it
        is exact; scaling 16-bit gradients in place would round every one of them a second time.
        """
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = squared_norm(gradients, gradients[0].device if gradients else torch.device("cpu")).sqrt()
        self._scale = clip_coefficient(norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Upcast gradients, scale them by the pending clip, step the masters, round them into the live parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.inner.param_groups
        try:
            for group, inner_group, pieces in zip(self.param_groups, groups, self._pieces, strict=True):
                options = {key: value for key, value in group.items() if key != "params"}
                inner_group.update(options)
                for bucket in buckets(chain(*pieces)):
                    self._step_bucket(bucket, options)
        finally:
            self.inner.param_groups = groups
            self._scale = None
        return loss

    def _step_bucket(self, bucket: list[tuple[Piece, Tensor]], options: dict[str, Any]) -> None:
        elements = sum(piece.master.numel() for piece, _ in bucket)
        upcast = self._scratch_on(bucket[0][0].master.device, elements)
        start = 0
        for piece, gradient in bucket:
            end = start + piece.master.numel()
            piece.master.grad = upcast[start:end].view_as(piece.master).copy_(gradient)
            start = end
        if self._scale is not None:
            upcast[:elements].mul_(self._scale)
        self.inner.param_groups = [{**options, "params": [piece.master for piece, _ in bucket]}]
        self.inner.step()
        for piece, _ in bucket:
            piece.master.grad = None
            piece.live().copy_(piece.master)

    def _scratch_on(self, device: torch.device, elements: int) -> Tensor:
        held = self._scratch.get(device)
        if held is None or held.numel() < elements:
            held = self._scratch[device] = torch.empty(elements, dtype=torch.float32, device=device)
        return held

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add live parameters; their masters are upcast from them."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            group = self.param_groups[-1]
            masters = _upcast(group["params"])
            pieces = [list(pieces_of(*pair, whole=self._whole)) for pair in zip(group["params"], masters, strict=True)]
            self.masters += masters
            self._pieces.append(pieces)
            self.inner.add_param_group({**group, "params": [piece.master for piece in chain(*pieces)]})
            self._take_options()

    def _take_options(self) -> None:
        """Show the inner optimizer's hyperparameters in our groups, where schedules look for them."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner_group.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """State and groups as any optimizer over the live parameters has them, and the masters, in order. The pieces that
        tensors are stepped in leave no trace: another device may have others.
        """
        numbers = count()
        groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
        state = {}
        for index, pieces in enumerate(chain(*self._pieces)):
            states = [self.inner.state[piece.master] for piece in pieces if piece.master in self.inner.state]
            if states:
                shape = pieces[0].parameter.shape
                state[index] = {name: joined([each[name] for each in states], pieces, shape) for name in states[0]}
        return {"state": state, "param_groups": groups, "masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and state bit for bit, and round the masters into the live parameters.

        Raises:
            KeyError: the dictionary holds no masters. Deriving them from 16-bit weights would lose what they exist to keep.
            ValueError: it is of other parameters.
        """
        if "masters" not in state_dict:
            raise KeyError("the optimizer state holds no masters; it was not saved by MasterWeightOptimizer")
        saved = state_dict["masters"]
        if [tuple(master.shape) for master in saved] != [tuple(master.shape) for master in self.masters]:
            raise ValueError("the saved masters have other shapes than these parameters")
        state: dict[int, dict[str, Any]] = {}
        position = 0
        for index, pieces in enumerate(chain(*self._pieces)):
            for piece in pieces:
                if index in state_dict["state"]:
                    held = state_dict["state"][index]
                    state[position] = {name: part_of(value, piece) for name, value in held.items()}
                position += 1
        packed = self.inner.state_dict()["param_groups"]
        groups = [{**options, "params": own["params"]} for options, own in zip(state_dict["param_groups"], packed, strict=True)]
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        self.state = self.inner.state
        for master, stored in zip(self.masters, saved, strict=True):
            master.copy_(stored)
        self._take_options()
        for piece in chain(*chain(*self._pieces)):
            piece.live().copy_(piece.master)


def _upcast(live: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().to(torch.float32, copy=True).contiguous() for parameter in live]


def _checked(live: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Tensor]:
    """The masters given, once they fit their parameters."""
    if len(masters) != len(live):
        raise ValueError(f"{len(masters)} masters for {len(live)} parameters")
    for parameter, master in zip(live, masters, strict=True):
        if master.shape != parameter.shape or master.dtype != torch.float32 or master.device != parameter.device:
            raise ValueError(
                f"a master must be float32 with the shape and device of its parameter: {tuple(parameter.shape)} on "
                f"{parameter.device}, found {master.dtype} {tuple(master.shape)} on {master.device}"
            )
    return [master.detach().contiguous() for master in masters]
