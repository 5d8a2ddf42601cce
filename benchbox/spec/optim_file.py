"""The section `optim` of matrix and training files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from benchbox.spec.optim import OptimSpec, SpikeSpec
from benchbox.spec.types import ABSENT, Count, Strict, refusal

# Defaults are those of the dataclasses. Any: the type of a key in the file may be narrower than that of the field.
_OPTIM: Any = OptimSpec()
_SPIKE: Any = SpikeSpec()

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=0, le=1_000_000_000)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]


class GroupFile(Strict):
    match: Annotated[str, Field(min_length=1)]
    """Glob over parameter names, as in `vision.*`; `*` matches dots as well."""
    lr: NonNegative = ABSENT
    """Peak learning rate; that of the parameter's role when it is absent."""
    weight_decay: NonNegative = ABSENT
    """Weight decay; parameters whose role exempts them remain exempt."""
    betas: Betas = ABSENT
    """Decay of the moments; that of all parameters when it is absent."""

    @model_validator(mode="after")
    def _check_effect(self) -> GroupFile:
        if not self.model_fields_set & {"lr", "weight_decay", "betas"}:
            raise refusal(f"the group {self.match!r} sets nothing", "give lr, weight_decay or betas")
        return self


class SpikeFile(Strict):
    action: Literal["skip", "stop"] = _SPIKE.action
    """Skip the step and count it, or stop the training."""
    factor: Annotated[float, Field(gt=1)] = _SPIKE.factor
    """A gradient norm above this many times the median of the last norms is a spike."""
    window: Annotated[int, Field(ge=1, le=100_000)] = _SPIKE.window
    """Number of last norms in the median."""
    max: Positive = ABSENT
    """A fixed bound of the norm, in place of factor and window."""

    @model_validator(mode="after")
    def _check_bound(self) -> SpikeFile:
        if "max" in self.model_fields_set and (extra := self.model_fields_set & {"factor", "window"}):
            raise refusal(f"max and {' and '.join(sorted(extra))} exclude one another", "give one of the two bounds")
        return self


class OptimFile(Strict):
    lr: NonNegative = _OPTIM.lr
    """Peak learning rate."""
    betas: Betas = Field(default=list(_OPTIM.betas))
    """Decay of the moments per step."""
    eps: Positive = _OPTIM.eps
    """Term that is added to the root of the second moment."""
    weight_decay: NonNegative = _OPTIM.weight_decay
    """Weight decay; parameters whose role exempts them have none."""
    head_lr: NonNegative = ABSENT
    """Learning rate of the action head; that of the other parameters when it is absent."""
    max_grad_norm: Positive = _OPTIM.max_grad_norm
    """Norm to which larger gradients are clipped."""
    schedule: Literal["constant", "warmup_constant", "warmup_cosine", "wsd"] = _OPTIM.schedule
    """wsd: warm-up, a stable phase, and a decay at the end."""
    warmup_steps: Steps = _OPTIM.warmup_steps
    """Steps in which the learning rate rises to lr; constant has none."""
    total_steps: Annotated[Steps, Field(ge=1)] = _OPTIM.total_steps
    """Step at which warmup_cosine and wsd have come down to final_lr."""
    final_lr: NonNegative = _OPTIM.final_lr
    """Learning rate at the end of warmup_cosine and wsd."""
    decay_steps: Count = ABSENT
    """wsd: steps of the decay at the end of total_steps; a fifth of total_steps when it is absent."""
    decay_shape: Literal["linear", "1-sqrt"] = ABSENT
    """wsd: shape of the decay, by default 1-sqrt."""
    freeze_backbone_steps: Steps = _OPTIM.freeze_backbone_steps
    """Steps in which only the head trains, before the backbone does too."""
    thaw_warmup_steps: Steps = _OPTIM.thaw_warmup_steps
    """Warm-up of the backbone once it trains."""
    head_weight_decay: NonNegative = ABSENT
    """Weight decay of the action head; that of the other parameters when it is absent."""
    groups: list[GroupFile] = Field(default=[])
    """Hyperparameters by parameter name; the first match wins, and the role decides for the remaining parameters."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] = ABSENT
    """Decay per step of an exponential moving average of the weights in float32; no average when it is absent."""
    ema_warmup: bool = _OPTIM.ema_warmup
    """Whether that decay is at most (1 + n) / (10 + n) at the n-th update."""
    spike: SpikeFile = ABSENT
    """Steps whose gradient norm is a spike; they are taken like any other when it is absent."""

    @model_validator(mode="after")
    def _check_effect(self) -> OptimFile:
        keys = self.model_fields_set
        if self.schedule != "wsd" and (unused := keys & {"decay_steps", "decay_shape"}):
            raise refusal(f"{' and '.join(sorted(unused))} belong to schedule: wsd, and the schedule is {self.schedule}")
        if self.schedule == "wsd" and (self.decay_steps or 0) > self.total_steps:
            raise refusal(f"decay_steps {self.decay_steps} are more than total_steps {self.total_steps}", "shorten decay_steps")
        if self.schedule == "wsd" and self.warmup_steps > (start := optim_spec(self).decay_start):
            message = f"warmup_steps {self.warmup_steps} reach into the decay from step {start} of {self.total_steps}"
            raise refusal(message, "shorten warmup_steps or decay_steps")
        if self.schedule in ("warmup_cosine", "wsd") and "final_lr" in keys and self.final_lr > self.lr:
            raise refusal(f"final_lr {self.final_lr} is above lr {self.lr}, and a decay does not raise it", "lower final_lr")
        if "thaw_warmup_steps" in keys and not self.freeze_backbone_steps:
            raise refusal("thaw_warmup_steps needs freeze_backbone_steps: nothing is frozen")
        if "ema_warmup" in keys and self.ema_decay is None:
            raise refusal("ema_warmup needs ema_decay: there is no average")
        return self


def optim_spec(optim: OptimFile) -> OptimSpec:
    """Return the optimisation that the section describes."""
    return OptimSpec.from_dict(optim.model_dump())
