"""Probes of single tensors: the update that a step should make, and the update it made."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..facts import MIN_STEPS_BEFORE_LATER, SIXTEEN_BIT, UpdateStatistics
from ..introspect.masters import detect_compensation, has_known_arithmetic
from ..introspect.tensors import dtype_name, is_plain, local_norm, local_shard
from ..introspect.wrappers import world_size
from .expected_update import (
    adam_betas,
    compensated_weight,
    differing_share,
    expected_update,
    float_or_none,
    sample,
    sample_view,
)
from .rounding import is_bf16_valued, stalled_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Elements sampled from one tensor: enough to know a share to half a percent. In a policy of a thousand tensors these are 16 M
# elements, some 100 MiB during a probed step.
MAX_ELEMENTS = 2**14

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_ODD = 0x9E3779B97F4A7C15 - 2**64  # Knuth's multiplicative hashing: 2^64 over the golden ratio


def can_probe(tensor: Tensor) -> bool:
    """Return whether a tensor and its gradient can be compared elementwise: plain floating point, dense, and not on meta."""
    return all(
        shard.is_floating_point() and shard.layout == torch.strided and shard.device.type != "meta" and is_plain(shard)
        for shard in (local_shard(part) for part in (tensor, tensor.grad) if part is not None)
    )


class WeightedShare:
    """Mean of shares over several tensors, weighted by their numbers of elements."""

    def __init__(self) -> None:
        self.elements = 0
        self._count = 0.0

    def add(self, share: float | None, elements: int) -> None:
        """Add the share of a tensor; None and empty tensors do not count."""
        if share is not None and elements:
            self.elements += elements
            self._count += share * elements

    @property
    def share(self) -> float | None:
        return self._count / self.elements if self.elements else None


class TensorProbe:
    """Observations of one stepped tensor over the probed steps, on a sample of its elements."""

    def __init__(self) -> None:
        self.steps = 0
        self.updates = self.updates_lost = 0
        self.update_squared = self.update_dot = 0.0
        self.gradient_squared: float | None = None
        self.second_moment_zero, self.second_moment_stalled = WeightedShare(), WeightedShare()
        self.live_differs_first = WeightedShare()
        self.live_differs: float | None = None
        self.steps_before: int | None = None
        self.bf16_valued: dict[str, WeightedShare] = {}
        self.steps_before_later: int | None = None
        self.bf16_valued_later: dict[str, WeightedShare] = {}
        self.dtype: torch.dtype | None = None
        self.first_step = self.last_step = 0
        self.digest_before: str | None = None
        self.digest_after: str | None = None
        self._initial: Tensor | None = None
        self._moved = self._had_step_without_update = False
        self._before: Tensor | None = None
        self._update: Tensor | None = None
        self._with_gradient: Tensor | None = None

    def start(self, tensor: Tensor, optimizer_state: Mapping[str, Any], group: Mapping[str, Any], step: int) -> None:
        """Record the tensor before its first probed step: its values, and traces of an earlier rounding."""
        self.steps_before = _step_count(group, optimizer_state)
        self.first_step = step
        self.dtype = tensor.dtype
        shard = local_shard(tensor).detach()
        self._initial = sample(shard, MAX_ELEMENTS)
        if world_size() > 1 and self._initial.numel() and bool((self._initial != self._initial[0]).any()):
            self.digest_before = _digest(self._initial)
        states = _sampled_state(shard, optimizer_state)
        self.bf16_valued = _bf16_valued({"weight": self._initial, **states}, _had_gradient(states))

    def compare_live(self, tensor: Tensor, live: Tensor, *, before_first_step: bool) -> None:
        """Compare the live tensor, between steps, with the stepped tensor rounded to its dtype."""
        stepped_values, live_values = (sample_view(local_shard(part), MAX_ELEMENTS) for part in (tensor, live))
        if stepped_values.numel() != live_values.numel() or live_values.device.type == "meta":
            return
        share = differing_share(stepped_values.to(device=live_values.device, dtype=live_values.dtype), live_values)
        if before_first_step:
            self.live_differs_first.add(share, stepped_values.numel())
        else:
            self.live_differs = max(share, self.live_differs or 0.0)

    def before_step(
        self, optimizer: Any, group: Mapping[str, Any], tensor: Tensor, optimizer_state: Mapping[str, Any], step: int
    ) -> None:
        """Compute the expected update, and look for traces of rounding since earlier steps, right before a probed step."""
        shard = local_shard(tensor).detach()
        full_gradient = local_shard(tensor.grad).detach()  # type: ignore[arg-type]
        self.gradient_squared = local_norm(full_gradient) ** 2
        gradient = sample_view(full_gradient, MAX_ELEMENTS)
        self._with_gradient = gradient.bool()
        state = _sampled_state(shard, optimizer_state)
        if self.steps_before_later is None and step > self.first_step:
            observed_steps = step - self.first_step
            self._look_again(sample_view(shard, MAX_ELEMENTS), state, _step_count(group, optimizer_state), observed_steps)
        self._before = compensated_weight(sample(shard, MAX_ELEMENTS), state)
        if (count := optimizer_state.get("step")) is not None:
            state["step"] = count
        # The options of an unknown optimizer may be those of Adam, and its arithmetic another.
        is_known = has_known_arithmetic(optimizer) or detect_compensation(optimizer, optimizer_state) is not None
        self._update = expected_update(optimizer, group, state, self._before, gradient) if is_known else None

    def _look_again(self, weight: Tensor, state: Mapping[str, Any], counted_steps: int, observed_steps: int) -> None:
        """Look for rounding of the weight and the moments by something that does it between observed steps.

        Of the weight, elements that are what they were at first may have come from a bfloat16 checkpoint. A state that was
        loaded meanwhile, by whose count more steps were taken, may have been rounded once, when it was saved.
        """
        steps_before = counted_steps or observed_steps  # SGD counts none
        if steps_before >= MIN_STEPS_BEFORE_LATER and steps_before - (self.steps_before or 0) <= observed_steps:
            self.steps_before_later = steps_before
            moved = None if self._initial is None else weight != self._initial
            self.bf16_valued_later = _bf16_valued({"weight": weight}, moved) | _bf16_valued(state, _had_gradient(state))

    def after_step(self, group: Mapping[str, Any], tensor: Tensor, optimizer_state: Mapping[str, Any], step: int) -> None:
        """Compare the stored tensor with the expected update, right after a probed step."""
        shard = local_shard(tensor).detach()
        self.last_step = step
        stored = sample_view(shard, MAX_ELEMENTS)
        if self.digest_before is not None:
            self.digest_after = _digest(stored)
        if self._initial is None or self._before is None or self._with_gradient is None:
            return
        self.steps += 1
        state = _sampled_state(shard, optimizer_state)
        self._moved = self._moved or not torch.equal(stored, self._initial)
        if self._update is not None:
            movement = compensated_weight(stored, state).float() - self._before.float()
            self._compare_update(self._update, movement, self._with_gradient)
        if (second_moment := state.get("exp_avg_sq")) is not None:
            self._record_second_moment(group, second_moment, self._with_gradient)
        self._before = self._update = self._with_gradient = None

    def _compare_update(self, expected: Tensor, movement: Tensor, with_gradient: Tensor) -> None:
        update = torch.where(with_gradient, expected, 0.0)
        updates, arrived = _count_pairs(update, movement)
        precise = update.double()
        squared, dot = torch.stack([precise @ precise, precise @ movement.double()]).tolist()
        self._had_step_without_update |= not updates
        if math.isfinite(squared) and math.isfinite(dot):  # nobody can say how much of any other update arrives
            self.updates += updates
            self.updates_lost += updates - arrived
            self.update_squared += squared
            self.update_dot += dot

    def _record_second_moment(self, group: Mapping[str, Any], second_moment: Tensor, with_gradient: Tensor) -> None:
        countable = second_moment.float() if second_moment.itemsize == 1 else second_moment  # torch counts no float8
        elements, nonzero = _count_pairs(with_gradient, countable)
        if elements:
            self.second_moment_zero.add((elements - nonzero) / elements, elements)
        if (betas := adam_betas(group)) is not None and dtype_name(second_moment) in SIXTEEN_BIT:
            self.second_moment_stalled.add(stalled_share(second_moment, betas[1]), second_moment.numel())

    @property
    def pinned_steps(self) -> int:
        """Steps over which the tensor stayed bit-identical although each probed step had an update for it."""
        pinned = self.steps > 1 and self.updates > 0 and not self._moved and not self._had_step_without_update
        return self.last_step - self.first_step + 1 if pinned else 0


def update_statistics(probes: Iterable[TensorProbe]) -> UpdateStatistics:
    """Return the statistics of one tensor from the probes of its parts."""
    probes = list(probes)
    gradients = [probe.gradient_squared for probe in probes if probe.gradient_squared is not None]
    live_differs = [probe.live_differs for probe in probes if probe.live_differs is not None]
    return UpdateStatistics(
        steps=max(probe.steps for probe in probes),
        updates=sum(probe.updates for probe in probes),
        updates_lost=sum(probe.updates_lost for probe in probes),
        update_squared=sum(probe.update_squared for probe in probes),
        update_dot=sum(probe.update_dot for probe in probes),
        pinned_steps=min(probe.pinned_steps for probe in probes),
        gradient_squared=sum(gradients) if gradients else None,
        second_moment_zero=_mean_share(probe.second_moment_zero for probe in probes),
        second_moment_stalled=_mean_share(probe.second_moment_stalled for probe in probes),
        steps_before=min((probe.steps_before for probe in probes if probe.steps_before is not None), default=None),
        bf16_valued=_mean_shares(probe.bf16_valued for probe in probes),
        steps_before_later=min(
            (probe.steps_before_later for probe in probes if probe.steps_before_later is not None), default=None
        ),
        bf16_valued_later=_mean_shares(probe.bf16_valued_later for probe in probes),
        live_differs_first=_mean_share(probe.live_differs_first for probe in probes),
        live_differs=max(live_differs) if live_differs else None,
        digest_before=_joined(probe.digest_before for probe in probes),
        digest_after=_joined(probe.digest_after for probe in probes),
    )


def _count_pairs(a: Tensor, b: Tensor) -> tuple[int, int]:
    """Return the number of non-zero elements of `a`, and of those that are non-zero in `b` too, in one read of the device."""
    first, both = torch.stack([a.count_nonzero(), torch.logical_and(a, b).count_nonzero()]).tolist()
    return first, both


def _digest(values: Tensor) -> str:
    """Return a number that differs where any bit does, but for chance: a sum modulo 2^64, computed where the values are."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).long()
    factors = torch.arange(1, 2 * len(bits), 2, device=bits.device) * _ODD
    return f"{int((bits * factors).sum()):x}"


def _joined(digests: Iterable[str | None]) -> str | None:
    return " ".join(filter(None, digests)) or None


def _mean_share(shares: Iterable[WeightedShare]) -> float | None:
    mean = WeightedShare()
    for share in shares:
        mean.add(share.share, share.elements)
    return mean.share


def _mean_shares(shares_by_name: Iterable[Mapping[str, WeightedShare]]) -> dict[str, float]:
    named: dict[str, list[WeightedShare]] = defaultdict(list)
    for shares in shares_by_name:
        for name, share in shares.items():
            named[name].append(share)
    means = {name: _mean_share(shares) for name, shares in named.items()}
    return {name: mean for name, mean in means.items() if mean is not None}


def _step_count(group: Mapping[str, Any], optimizer_state: Mapping[str, Any]) -> int:
    """Return the steps that the optimizer counts for a tensor."""
    return int(float_or_none(optimizer_state.get("step", group.get("step"))) or 0)


def _bf16_valued(tensors: Mapping[str, Tensor], relevant: Tensor | None) -> dict[str, WeightedShare]:
    """Return the share of non-zero elements of each float32 tensor that bfloat16 holds exactly, of the relevant ones."""
    read = {name: values for name, values in tensors.items() if dtype_name(values) == "float32"}
    if not read:
        return {}
    values = torch.stack(list(read.values()))
    counted = values != 0 if relevant is None else (values != 0) & relevant
    counts = torch.stack([(is_bf16_valued(values) & counted).sum(dim=1), counted.sum(dim=1)], dim=1).tolist()
    shares: dict[str, WeightedShare] = defaultdict(WeightedShare)
    for name, (exact, count) in zip(read, counts, strict=True):
        shares[name].add(exact / count if count else None, count)
    return shares


def _had_gradient(states: Mapping[str, Tensor]) -> Tensor | None:
    """Return a mask of the elements that ever had a gradient, or None if no optimizer state shows it.

    Rows of an embedding may wait long for their first gradient.
    """
    moment = next((states[name] for name in ("exp_avg_sq", "exp_avg", "momentum_buffer") if name in states), None)
    return None if moment is None else moment != 0


def _sampled_state(shard: Tensor, optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return samples of the state tensors that have one value per element of the stepped tensor, to be read at once.

    A number for the whole tensor, such as NAdam's mu_product, may have the shape of a scalar parameter; it stays on the CPU.
    """
    shards = {
        name: local_shard(value).detach()
        for name, value in optimizer_state.items()
        if isinstance(value, Tensor) and name != "step"
    }
    return {
        name: sample_view(value, MAX_ELEMENTS)
        for name, value in shards.items()
        if value.shape == shard.shape and shard.numel() and value.device == shard.device and is_plain(value)
    }
