"""Float32 master weights for 16-bit live parameters, for backends that keep none of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchbox.optim.norm import clip_coefficient, squared_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Gradients are upcast, stepped and dropped a bucket at a time: extra memory stays at 64 MiB instead of 4 bytes a parameter.
_BUCKET_ELEMENTS = 16 * 2**20


class MasterWeightOptimizer(Optimizer):
    """Steps float32 masters with `inner`, then rounds them into the live parameters.

    It is an `Optimizer` over the live parameters: a schedule built on it reaches the step, `zero_grad` clears the gradients the
    backward pass wrote, and libraries that look for an `Optimizer` find one. `state` is that of the masters.

    Args:
        params: live parameters, or groups of them, as for any optimizer.
        inner: the optimizer class that steps the masters; further keyword arguments go to it.
        masters: float32 copies made *before* the live parameters were cast, in the order of `params`. Without them masters are
            upcast from the live parameters, and whatever the cast rounded away is gone.

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
        if masters is None:
            masters = [parameter.detach().to(torch.float32) for parameter in live]
        if len(masters) != len(live):
            raise ValueError(f"{len(masters)} masters for {len(live)} parameters")
        for parameter, master in zip(live, masters, strict=True):
            if master.shape != parameter.shape or master.dtype != torch.float32 or master.device != parameter.device:
                raise ValueError(
                    f"a master must be float32 with the shape and device of its parameter: {tuple(parameter.shape)} on "
                    f"{parameter.device}, found {master.dtype} {tuple(master.shape)} on {master.device}"
                )
        remaining = iter([master.detach().clone() for master in masters])
        self.inner = inner(
            [{**group, "params": [next(remaining) for _ in group["params"]]} for group in self.param_groups],
            **inner_arguments,
        )
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner_group.items() if key != "params"})
        self.defaults = self.inner.defaults
        self.state = self.inner.state
        self._scale: Tensor | None = None

    @property
    def masters(self) -> list[Tensor]:
        """The float32 masters, in the order of the live parameters."""
        return [master for group in self.inner.param_groups for master in group["params"]]

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
            for group, inner_group in zip(self.param_groups, groups, strict=True):
                options = {key: value for key, value in group.items() if key != "params"}
                inner_group.update(options)
                for live, masters in _buckets(group["params"], inner_group["params"]):
                    for parameter, master in zip(live, masters, strict=True):
                        assert parameter.grad is not None
                        master.grad = parameter.grad.to(torch.float32)
                        if self._scale is not None:
                            master.grad.mul_(self._scale)
                    self.inner.param_groups = [{**options, "params": masters}]
                    self.inner.step()
                    for master in masters:
                        master.grad = None
                    torch._foreach_copy_(live, masters)
        finally:
            self.inner.param_groups = groups
            self._scale = None
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add live parameters; their masters are upcast from them."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": [p.detach().to(torch.float32).clone() for p in group["params"]]})
            group.update({key: value for key, value in self.inner.param_groups[-1].items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and groups, and the masters, in order."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({key: value for key, value in group.items() if key != "params"})
        return {**self.inner.state_dict(), "masters": self.masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore masters and state bit for bit, and round the masters into the live parameters.

        Raises:
            KeyError: the dictionary holds no masters. Deriving them from 16-bit weights would lose what they exist to keep.
        """
        if "masters" not in state_dict:
            raise KeyError("the optimizer state holds no masters; it was not saved by MasterWeightOptimizer")
        saved = state_dict["masters"]
        if len(saved) != len(self.masters):
            raise ValueError(f"the saved state has {len(saved)} masters, this optimizer {len(self.masters)}")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        self.state = self.inner.state
        for master, stored in zip(self.masters, saved, strict=True):
            master.copy_(stored)
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({key: value for key, value in inner_group.items() if key != "params"})
            torch._foreach_copy_(group["params"], inner_group["params"])


def _buckets(live: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of parameters with a gradient, at most `_BUCKET_ELEMENTS` elements at a time (a larger tensor stands alone)."""
    bucket: tuple[list[Tensor], list[Tensor]] = ([], [])
    elements = 0
    for parameter, master in zip(live, masters, strict=True):
        if parameter.grad is None:
            continue
        if bucket[0] and elements + parameter.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = ([], []), 0
        bucket[0].append(parameter)
        bucket[1].append(master)
        elements += parameter.numel()
    if bucket[0]:
        yield bucket
