"""Optimisation of a cell: AdamW, its parameter groups, its schedule, and what happens around its step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from benchbox.spec.stored_fields import known_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

# Metadata of a field that was added after records were published: at its default it is left out of the id, and ids stay.
ADDED_LATER = {"added_later": True}
DEFAULT_DECAY_SHARE = 5  # wsd: the decay takes a fifth of the steps unless the file says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Hyperparameters of the parameters whose names match a pattern. None: what the role of the parameter says.

    `match` is a glob over names before wrapping; `*` matches dots as well. Parameters whose role exempts them from weight decay
    remain exempt.
    """

    match: str
    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the specification of plain JSON values."""
        betas = values.get("betas")
        return cls(**{**known_fields(cls, values), "betas": None if betas is None else tuple(betas)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeSpec:
    """Gradient norms that count as spikes, and what happens to their steps.

    A norm is a spike above `max`, or without `max` above `factor` times the median of the last `window` norms that were none.
    A norm that is not finite is always one.
    """

    action: str = "skip"  # skip | stop
    factor: float = 10.0
    window: int = 100
    max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """AdamW and its schedule. Defaults are those of the pi family (openpi, lerobot)."""

    lr: float = 2.5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    head_lr: float | None = None  # None: the same as lr
    max_grad_norm: float = 1.0
    schedule: str = "warmup_cosine"  # constant | warmup_constant | warmup_cosine | wsd
    warmup_steps: int = 1000
    total_steps: int = 30_000
    final_lr: float = 2.5e-6
    decay_steps: int | None = field(default=None, metadata=ADDED_LATER)  # wsd; None: a fifth of total_steps
    decay_shape: str | None = field(default=None, metadata=ADDED_LATER)  # wsd: 1-sqrt | linear; None: 1-sqrt
    freeze_backbone_steps: int = field(default=0, metadata=ADDED_LATER)  # steps before the backbone trains
    thaw_warmup_steps: int = field(default=0, metadata=ADDED_LATER)  # of the backbone, once it trains
    head_weight_decay: float | None = field(default=None, metadata=ADDED_LATER)  # None: the same as weight_decay
    groups: tuple[GroupSpec, ...] = field(default=(), metadata=ADDED_LATER)  # the first match wins
    ema_decay: float | None = field(default=None, metadata=ADDED_LATER)  # None: no average of the weights
    ema_warmup: bool = field(default=False, metadata=ADDED_LATER)  # whether the decay grows from 0.1
    spike: SpikeSpec | None = field(default=None, metadata=ADDED_LATER)

    @property
    def decay_start(self) -> int:
        """Step from which the learning rate of `wsd` decays."""
        steps = self.total_steps // DEFAULT_DECAY_SHARE if self.decay_steps is None else self.decay_steps
        return max(0, self.total_steps - steps)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = asdict(self)
        values["betas"] = list(self.betas)
        values["groups"] = [{**asdict(group), "betas": group.betas and list(group.betas)} for group in self.groups]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the optimisation of `to_dict`; fields that are missing have their default."""
        spike = values.get("spike")
        nested = {
            "betas": tuple(values["betas"]),
            "groups": tuple(map(GroupSpec.from_dict, values.get("groups", ()))),
            "spike": None if spike is None else SpikeSpec(**known_fields(SpikeSpec, spike)),
        }
        return cls(**{**known_fields(cls, values), **nested})
