"""BXP3xx: gradients: where they accumulate, how they are reduced, clipped and scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.audit.rules.base import SIXTEEN_BIT, RuleViolation, Rule, abbreviate
from benchbox.observer.facts import REDUCTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import CollectiveUse, RankFacts, StepFacts

# A sum of n bfloat16 numbers that is rounded at every addition is off by up to n x 2^-9 of itself: a gradient of 64 ranks by as
# much as an eighth, that of 8 by 1.6%. Ring reductions add one rank at a time.
_LARGE_WORLD = 64
# Relative slack of a norm: gradients in 16 bits are rounded when they are scaled.
_SLACK = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03}


def _accumulation(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    found = {each.rank: sorted(SIXTEEN_BIT & set(each.accumulated_in)) for each in facts}
    if ranks := [rank for rank, dtypes in found.items() if dtypes]:
        micro = [step.micro_batches for each in facts for step in each.steps if step.micro_batches is not None]
        evidence = {"dtypes": sorted({d for dtypes in found.values() for d in dtypes}), "ranks": ranks}
        yield RuleViolation("warning", "gradients", ranks[0], evidence | {"micro-batches": max(micro, default=None)})


def _gradient_reductions(facts: RankFacts) -> list[CollectiveUse]:
    """Of the collectives of a step, those that reduce gradients: the large ones, not the sums of norms and flags."""
    reductions = [each for each in facts.collectives if each.operation in REDUCTIONS and "float" in each.dtype]
    largest = max((each.elements for each in reductions), default=0)
    floor = max(largest // 8, 2)
    return [each for each in reductions if each.elements >= floor]


def _low_reduction(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    low = {each.rank: [found for found in _gradient_reductions(each) if found.dtype in SIXTEEN_BIT] for each in facts}
    if ranks := [rank for rank, found in low.items() if found]:
        world = max(each.world_size for each in facts)
        severity: Severity = "warning" if world >= _LARGE_WORLD else "info"
        told = abbreviate(f"{found.operation} of {found.elements:,} elements in {found.dtype}" for found in low[ranks[0]])
        yield RuleViolation(severity, "gradients", ranks[0], {"collectives": told, "world size": world, "ranks": ranks})


def _other_reduction(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Only where nothing is reduced as configured: activations may be summed in another dtype beside (tensor parallelism)."""
    for each in facts:
        if each.reduction is None:
            continue
        other = _gradient_reductions(each)
        if other and all(found.dtype != each.reduction.dtype for found in other):
            yield RuleViolation(
                "error",
                each.reduction.source,
                each.rank,
                {
                    "configured": each.reduction.dtype,
                    "observed": abbreviate(
                        f"{found.operation} of {found.elements:,} elements in {found.dtype}" for found in other
                    ),
                },
            )
            return


def _no_reduction(facts: Sequence[RankFacts]) -> str | None:
    configured = any(each.reduction is not None for each in facts)
    return "no reduction of gradients was seen" if configured and not any(map(_gradient_reductions, facts)) else None


def _unread_clip(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        dtype = next((tensor.gradient_dtype for tensor in each.stepped if tensor.gradient_dtype), "float32")
        for step in each.steps:
            if _is_unclipped(step, _SLACK.get(dtype, 0.01)):
                evidence = {
                    "reported": step.reported_norm,
                    "clipped to": step.max_norm,
                    "norm the optimizer read": step.stepped_norm,
                    "step": step.step,
                }
                yield RuleViolation("error", ", ".join(step.rates) or "optimizer", each.rank, evidence)
                return


def _is_unclipped(step: StepFacts, slack: float) -> bool:
    """Judged by what one rank holds of the gradients, which is never more than the whole: an alarm is never false."""
    if step.max_norm is None or step.reported_norm is None or step.stepped_norm is None or step.stepped_norm == 0.0:
        return False
    clipped = step.stepped_norm <= step.max_norm * (1.0 + slack)
    # Clipping that saw no gradients at all, or other ones, did not act on these.
    return not clipped or (step.reported_norm == 0.0 and step.stepped_norm > 0.0)


def _unscaled(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        if "scaler" in each.missing:
            continue
        half = [tensor.name for tensor in each.stepped if "float16" in (tensor.gradient_dtype, tensor.live_dtype, tensor.dtype)]
        if each.scaler is None and (half or _computes_in_float16(each)):
            evidence = {"float16": abbreviate(half) or ["matrix products"], "scaler": "none was seen"}
            yield RuleViolation("error", "gradients", each.rank, evidence)
            return
        if each.scaler is not None and each.scaler.steps > 1 and each.scaler.skipped == each.scaler.steps:
            skipped = {"steps": each.scaler.steps, "skipped": each.scaler.skipped}
            yield RuleViolation("error", each.scaler.name, each.rank, skipped, "loss scaling skips every step")
            return


def _computes_in_float16(facts: RankFacts) -> bool:
    """By autocast, or most products: a frozen float16 model that only looks on has no gradients to lose."""
    if facts.autocast is not None and facts.autocast.active and facts.autocast.dtype == "float16":
        return True
    return facts.products.get("float16", 0) > sum(facts.products.values()) / 2


RULES = (
    Rule(
        code="BXP301",
        title="micro-batches are accumulated in 16 bits",
        severity="warning",
        rationale="every addition is rounded to 8 significant bits: what a late micro-batch adds to a grown sum is partly lost",
        measurement="dtype of the gradients that a second or later micro-batch of a step found in place",
        repair="accumulate in float32 (float32 parameters or shards, DeepSpeed's data_types.grad_accum_dtype: fp32)",
        references=("pytorch#106395",),
        sections=("steps", "gradients"),
        check=_accumulation,
    ),
    Rule(
        code="BXP302",
        title="gradients are reduced over ranks in 16 bits",
        severity="warning",
        rationale=(
            "usual, and harmless over few ranks; the error of a sum grows with the number of ranks that are added one by one: "
            "a run that was stable over 96 was not over 384, and was again in float32 (pytorch#106395)"
        ),
        measurement="dtype of every reduction that one whole step made, on all ranks",
        repair="reduce in float32 (FSDP: reduce_dtype; DeepSpeed: communication_data_type; DDP: float32 gradients)",
        references=("pytorch#106395",),
        sections=("collectives",),
        check=_low_reduction,
    ),
    Rule(
        code="BXP303",
        title="gradients are reduced in another dtype than the configuration says",
        severity="error",
        rationale="configuration is not evidence: ZeRO with torch_autocast reports float32 and reduces in bfloat16",
        measurement=(
            "the wrapper's own policy (FSDP reduce_dtype, DDP communication hook, DeepSpeed communication_data_type) "
            "against the collectives of a step"
        ),
        repair="say what is meant where it is read (DeepSpeed: lower_precision_safe_modules: []), and audit again",
        references=("DeepSpeed 0.19 torch_autocast",),
        sections=("collectives", "setup"),
        check=_other_reduction,
        missing_evidence=_no_reduction,
    ),
    Rule(
        code="BXP304",
        title="clipping acts on gradients that the optimizer does not read",
        severity="error",
        rationale=(
            "the norm is reported and the step is taken with unclipped gradients, as when live gradients are clipped "
            "after masters had theirs"
        ),
        measurement="norm of the gradients inside the optimizer's step against the norm that clipping reported and its limit",
        repair="clip after the upcast to the masters (MasterWeightOptimizer.clip_grad_norm_), right before the step",
        references=("OpenTau#186",),
        sections=("steps", "clip", "numbers"),
        check=_unread_clip,
    ),
    Rule(
        code="BXP305",
        title="float16 is trained without loss scaling",
        severity="error",
        rationale="float16 gradients below 6e-8 are zero; without a scaler small ones vanish unseen",
        measurement="dtypes of gradients and products, calls of a GradScaler or DeepSpeed's loss scaler, and the steps it skipped",
        repair=(
            "train in bfloat16, or scale the loss (torch.amp.GradScaler); if every step is skipped the scaled loss "
            "overflows: lower init_scale"
        ),
        references=("arXiv:1710.03740",),
        sections=("stepped", "scaler"),
        check=_unscaled,
    ),
)
