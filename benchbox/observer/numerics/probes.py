"""Close looks at single tensors: what a step ought to do to them, and what it did."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..facts import UpdateStatistics
from ..introspect.tensors import dtype_name, local_shard
from .expected_update import betas_of, differing_share, expected_update, sample, value_of
from .rounding import bf16_valued_share, stalled_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Elements looked at in one tensor: enough to know a share to half a percent; in a policy of a thousand tensors 16 M elements,
# some 100 MiB while a step is looked at.
MOST_ELEMENTS = 2**14
SIXTEEN_BIT = frozenset({"bfloat16", "float16"})


def can_look_at(tensor: Tensor) -> bool:
    """Whether elements of a tensor and its gradient can be compared one by one: real numbers, dense, and really there."""
    return all(
        held.is_floating_point() and held.layout == torch.strided and held.device.type != "meta"
        for held in (local_shard(each) for each in (tensor, tensor.grad) if each is not None)
    )


class WeightedShare:
    """A share as a count of elements, so that shares of several tensors add up."""

    def __init__(self) -> None:
        self.of = 0
        self.count = 0.0

    def add(self, share: float | None, elements: int) -> None:
        if share is not None and elements:
            self.of += elements
            self.count += share * elements

    @property
    def share(self) -> float | None:
        return self.count / self.of if self.of else None


class Look:
    """What was seen of one tensor that is stepped."""

    def __init__(self) -> None:
        self.steps = 0
        self.updates = self.lost = 0
        self.squared = self.dot = 0.0
        self.gradient_squared: float | None = None
        self.second_moment_zero, self.second_moment_stalled = WeightedShare(), WeightedShare()
        self.differs_first = WeightedShare()
        self.differs: float | None = None
        self.steps_before: int | None = None
        self.bf16_valued: dict[str, WeightedShare] = defaultdict(WeightedShare)
        self.first_window = self.last_window = 0
        self._start: Tensor | None = None
        self._moved = self._without_update = False
        self._before: Tensor | None = None
        self._update: Tensor | None = None
        self._with_gradient: Tensor | None = None

    def first(self, tensor: Tensor, state: Mapping[str, Any], options: Mapping[str, Any], window: int) -> None:
        """Before the first step seen: where it starts, and the marks that a rounding in the past would have left."""
        count = state.get("step", options.get("step"))
        self.steps_before = 0 if count is None else int(float(count))
        self.first_window = window
        held = local_shard(tensor).detach()
        self._start = sample(held, MOST_ELEMENTS)
        states = _alike(held, state)
        for name, value in {"weight": held, **states}.items():
            if dtype_name(value) == "float32":
                part = sample(value, MOST_ELEMENTS)
                marked = part[(part != 0) & _has_history(states, part)]
                self.bf16_valued[name].add(bf16_valued_share(marked), marked.numel())

    def against_live(self, tensor: Tensor, live: Tensor, *, first: bool) -> None:
        """Between steps: whether the live tensor holds what the one that is stepped rounds to."""
        mine, theirs = sample(local_shard(tensor), MOST_ELEMENTS), sample(local_shard(live), MOST_ELEMENTS)
        if mine.numel() != theirs.numel() or theirs.device.type == "meta":
            return
        share = differing_share(mine.to(device=theirs.device, dtype=theirs.dtype), theirs)
        if first:
            self.differs_first.add(share, mine.numel())
        else:
            self.differs = max(share, self.differs or 0.0)

    def before(self, optimizer: Any, options: Mapping[str, Any], tensor: Tensor, state: Mapping[str, Any]) -> None:
        """Right before a step that is looked at."""
        held = local_shard(tensor).detach()
        whole = local_shard(tensor.grad).detach()  # type: ignore[arg-type]
        precision = torch.promote_types(whole.dtype, torch.float32)
        self.gradient_squared = torch.linalg.vector_norm(whole, dtype=precision).item() ** 2 if whole.numel() else 0.0
        gradient = sample(whole, MOST_ELEMENTS)
        self._with_gradient = gradient != 0
        held_state = {name: sample(value, MOST_ELEMENTS) for name, value in _alike(held, state).items()}
        self._before = value_of(sample(held, MOST_ELEMENTS), held_state)
        if (count := state.get("step")) is not None:
            held_state["step"] = count
        self._update = expected_update(optimizer, options, held_state, self._before, gradient)

    def after(self, options: Mapping[str, Any], tensor: Tensor, state: Mapping[str, Any], window: int) -> None:
        """Right after it."""
        held = local_shard(tensor).detach()
        self.last_window = window
        stored = sample(held, MOST_ELEMENTS)
        if self._start is None or self._before is None or self._with_gradient is None:
            return
        self.steps += 1
        held_state = {name: sample(value, MOST_ELEMENTS) for name, value in _alike(held, state).items()}
        moved = value_of(stored, held_state).float() - self._before.float()
        self._moved |= bool((stored != self._start).any())
        if self._update is not None:
            meant = self._with_gradient & (self._update != 0)
            updates = int(meant.sum())
            self.updates += updates
            self.lost += int((meant & (moved == 0)).sum())
            update = torch.where(meant, self._update, 0.0).double()
            self.squared += float(update.square().sum())
            self.dot += float((update * moved.double()).sum())
            self._without_update |= updates == 0
        self._judge_second_moment(options, held_state.get("exp_avg_sq"))
        self._before = self._update = self._with_gradient = None

    def _judge_second_moment(self, options: Mapping[str, Any], part: Tensor | None) -> None:
        if part is None or self._with_gradient is None:
            return
        with_gradient = int(self._with_gradient.sum())
        if with_gradient:
            zero = int(((part == 0) & self._with_gradient).sum())
            self.second_moment_zero.add(zero / with_gradient, with_gradient)
        if (betas := betas_of(options)) is not None and dtype_name(part) in SIXTEEN_BIT:
            self.second_moment_stalled.add(stalled_share(part, betas[1]), part.numel())

    @property
    def pinned_steps(self) -> int:
        pinned = self.steps > 1 and self.updates > 0 and not self._moved and not self._without_update
        return self.last_window - self.first_window + 1 if pinned else 0


def numbers(looks: Iterable[Look]) -> UpdateStatistics:
    """Of one tensor, from the looks at its parts."""
    looks = list(looks)
    tallies: dict[str, WeightedShare] = defaultdict(WeightedShare)
    zero, stalled, differs_first = WeightedShare(), WeightedShare(), WeightedShare()
    for look in looks:
        for name, tally in look.bf16_valued.items():
            tallies[name].add(tally.share, tally.of)
        zero.add(look.second_moment_zero.share, look.second_moment_zero.of)
        stalled.add(look.second_moment_stalled.share, look.second_moment_stalled.of)
        differs_first.add(look.differs_first.share, look.differs_first.of)
    gradients = [look.gradient_squared for look in looks if look.gradient_squared is not None]
    differs = [look.differs for look in looks if look.differs is not None]
    return UpdateStatistics(
        steps=max(look.steps for look in looks),
        updates=sum(look.updates for look in looks),
        updates_lost=sum(look.lost for look in looks),
        update_squared=sum(look.squared for look in looks),
        update_dot=sum(look.dot for look in looks),
        pinned_steps=min(look.pinned_steps for look in looks),
        gradient_squared=sum(gradients) if gradients else None,
        second_moment_zero=zero.share,
        second_moment_stalled=stalled.share,
        steps_before=min((look.steps_before for look in looks if look.steps_before is not None), default=None),
        bf16_valued={name: tally.share for name, tally in tallies.items() if tally.share is not None},
        live_differs_first=differs_first.share,
        live_differs=max(differs) if differs else None,
    )


def _has_history(states: Mapping[str, Tensor], part: Tensor) -> Tensor:
    """Elements that ever had a gradient, as far as their state tells: rows of an embedding may wait long for their first."""
    held = next((states[name] for name in ("exp_avg_sq", "exp_avg", "momentum_buffer") if name in states), None)
    return torch.ones_like(part, dtype=torch.bool) if held is None else sample(held, MOST_ELEMENTS) != 0


def _alike(held: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """State tensors that hold one number for each element of the tensor, as this rank has them."""
    found = {name: local_shard(value).detach() for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
    return {name: value for name, value in found.items() if value.shape == held.shape and held.numel()}
