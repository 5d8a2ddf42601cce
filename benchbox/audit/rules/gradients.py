"""BXP3xx: accumulation, reduction, clipping and scaling of gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from benchbox.audit.repairs import (
    ACCUMULATION_BY_LIBRARY,
    CLIPPING_BY_LIBRARY,
    MASTERS_BY_LIBRARY,
    REDUCTION_BY_LIBRARY,
    SCALING_BY_LIBRARY,
)
from benchbox.audit.rules.base import Rule, RuleViolation, abbreviate
from benchbox.observer.facts import REDUCTIONS, SIXTEEN_BIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import CollectiveUse, RankFacts, StepFacts

# A sum of n bfloat16 numbers that is rounded at every addition is off by up to n x 2^-9 of itself: a gradient of 64 ranks by as
# much as an eighth, that of 8 by 1.6%. Ring reductions add one rank at a time.
_LARGE_WORLD = 64
# Relative slack of a norm: gradients in 16 bits are rounded when they are scaled.
_NORM_SLACK = {"float32": 0.01, "bfloat16": 0.03, "float16": 0.03}


def _accumulation(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    dtypes_by_rank = {rank_facts.rank: sorted(SIXTEEN_BIT & set(rank_facts.accumulated_in)) for rank_facts in facts}
    if ranks := [rank for rank, dtypes in dtypes_by_rank.items() if dtypes]:
        micro_batches = [
            step.micro_batches for rank_facts in facts for step in rank_facts.steps if step.micro_batches is not None
        ]
        evidence = {
            "dtypes": sorted({dtype for dtypes in dtypes_by_rank.values() for dtype in dtypes}),
            "ranks": ranks,
            "micro-batches": max(micro_batches, default=None),
        }
        yield RuleViolation("warning", "gradients", ranks[0], evidence)


def _gradient_reductions(facts: RankFacts) -> list[CollectiveUse]:
    """Return the collectives of a step that reduce gradients: the large ones, not the sums of norms and flags.

    Tensor and sequence parallelism sum activations, which may be many times as large as all gradients.
    """
    reductions = [use for use in facts.collectives if use.operation in REDUCTIONS and "float" in use.dtype]
    largest = max((use.elements for use in reductions), default=0)
    gradients = sum(parameter.elements for parameter in facts.parameters if parameter.trainable) or largest
    floor = max(min(largest, gradients) // 8, 2)
    return [use for use in reductions if use.elements >= floor]


def _describe_collectives(collectives: Sequence[CollectiveUse]) -> list[str]:
    return abbreviate(f"{use.operation} of {use.elements:,} elements in {use.dtype}" for use in collectives)


def _low_precision_reduction(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    low = {
        rank_facts.rank: [use for use in _gradient_reductions(rank_facts) if use.dtype in SIXTEEN_BIT] for rank_facts in facts
    }
    if ranks := [rank for rank, collectives in low.items() if collectives]:
        world_size = max(rank_facts.world_size for rank_facts in facts)
        severity: Severity = "warning" if world_size >= _LARGE_WORLD else "info"
        evidence = {"collectives": _describe_collectives(low[ranks[0]]), "world size": world_size, "ranks": ranks}
        yield RuleViolation(severity, "gradients", ranks[0], evidence)


def _unconfigured_reduction(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Yield a violation if no reduction has the configured dtype: tensor parallelism may sum activations in another one."""
    for rank_facts in facts:
        configured = rank_facts.reduction
        if configured is None:
            continue
        reductions = _gradient_reductions(rank_facts)
        if reductions and all(use.dtype != configured.dtype for use in reductions):
            evidence = {"configured": configured.dtype, "observed": _describe_collectives(reductions)}
            yield RuleViolation("error", configured.source, rank_facts.rank, evidence)
            return


def _no_reduction(facts: Sequence[RankFacts]) -> str | None:
    configured = any(rank_facts.reduction is not None for rank_facts in facts)
    return "no reduction of gradients was seen" if configured and not any(map(_gradient_reductions, facts)) else None


def _ineffective_clipping(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        dtype = next((tensor.gradient_dtype for tensor in rank_facts.stepped if tensor.gradient_dtype), "float32")
        for step in rank_facts.steps:
            is_scaled = _is_clipped_scaled(step)
            if is_scaled or _is_unclipped(step, _NORM_SLACK.get(dtype, 0.01)):
                evidence = {
                    "reported": step.reported_norm,
                    "clipped to": step.max_norm,
                    "norm the optimizer read": step.stepped_norm,
                    **({"loss scale": step.clip_scale} if is_scaled else {}),
                    "step": step.step,
                }
                title = (
                    "gradients are clipped before they are unscaled: the limit is divided by the loss scale"
                    if is_scaled
                    else None
                )
                yield RuleViolation("error", ", ".join(step.rates) or "optimizer", rank_facts.rank, evidence, title)
                return


def _is_clipped_scaled(step: StepFacts) -> bool:
    """Return whether clipping limited gradients that were multiplied by the loss scale. A limit above the scale is meant so."""
    if step.clip_scale is None or step.max_norm is None or step.reported_norm is None:
        return False
    return step.reported_norm > step.max_norm and 1.0 < step.clip_scale > step.max_norm


def _is_unclipped(step: StepFacts, slack: float) -> bool:
    """Return whether clipping did not act on the gradients of this step. Only this rank's shard of them is compared, whose norm
    is never above the total, so there are no false alarms.
    """
    if step.max_norm is None or step.reported_norm is None or step.stepped_norm is None or step.stepped_norm == 0.0:
        return False
    if math.isnan(step.reported_norm) or not math.isfinite(step.stepped_norm):
        return False  # no clipping mends such gradients, and a scaler skips the step
    clipped = step.stepped_norm <= step.max_norm * (1.0 + slack)
    # Clipping that read no gradients at all, or other ones, did not act on these.
    return not clipped or (step.reported_norm == 0.0 and step.stepped_norm > 0.0)


def _norms_uncompared(facts: Sequence[RankFacts]) -> str | None:
    clipped = [step for rank_facts in facts for step in rank_facts.steps if step.max_norm is not None]
    if reason := next((step.changed_gradients for step in clipped if step.changed_gradients), None):
        return reason
    if clipped and all(step.stepped_norm is None for step in clipped):
        return "no clipping could be compared with the gradients that an optimizer read"
    return None


def _unscaled_float16(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        if "scaler" in rank_facts.missing:
            continue
        scaler = rank_facts.scaler
        float16 = [
            tensor.name
            for tensor in rank_facts.stepped
            if "float16" in (tensor.gradient_dtype, tensor.live_dtype, tensor.dtype)
        ]
        if scaler is None and (float16 or _computes_in_float16(rank_facts)):
            evidence = {"float16": abbreviate(float16) or ["matrix products"], "scaler": "none was seen"}
            yield RuleViolation("error", "gradients", rank_facts.rank, evidence)
            return
        if scaler is not None and scaler.steps > 1 and scaler.skipped == scaler.steps:
            skipped = {"steps": scaler.steps, "skipped": scaler.skipped}
            yield RuleViolation("error", scaler.name, rank_facts.rank, skipped, "loss scaling skips every step")
            return


def _computes_in_float16(facts: RankFacts) -> bool:
    """Return whether autocast or most products are float16: a frozen float16 teacher alone has no gradients to lose."""
    if facts.autocast is not None and facts.autocast.active and facts.autocast.dtype == "float16":
        return True
    products = facts.products_with_gradient or facts.products
    return products.get("float16", 0) > sum(products.values()) / 2


RULES = (
    Rule(
        code="BXP301",
        title="micro-batches are accumulated in 16 bits",
        severity="warning",
        rationale=(
            "every addition is rounded to 8 significant bits: the contribution of late micro-batches to a large sum is "
            "partly lost"
        ),
        measurement="dtype of the gradients that the second and later micro-batches of a step add to",
        repair="accumulate in float32 (float32 parameters or shards, DeepSpeed's data_types.grad_accum_dtype: fp32)",
        repairs=MASTERS_BY_LIBRARY | ACCUMULATION_BY_LIBRARY,
        locations=("cast", "default dtype"),
        references=("pytorch#106395",),
        sections=("steps", "gradients"),
        check=_accumulation,
    ),
    Rule(
        code="BXP302",
        title="gradients are reduced over ranks in 16 bits",
        severity="warning",
        conditions=f"info; warning from {_LARGE_WORLD} ranks on",
        rationale=(
            "usual, and harmless over few ranks; the error of a sum grows with the number of ranks that are added one by one: "
            "a run that was stable on 96 GPUs was unstable on 384, and stable again in float32 (pytorch#106395)"
        ),
        measurement="dtype of every reduction of one complete step, on all ranks",
        repair="reduce in float32 (FSDP: reduce_dtype; DeepSpeed: communication_data_type; DDP: float32 gradients)",
        repairs=REDUCTION_BY_LIBRARY,
        references=("pytorch#106395",),
        sections=("collectives",),
        check=_low_precision_reduction,
    ),
    Rule(
        code="BXP303",
        title="gradients are reduced in another dtype than the configuration says",
        severity="error",
        rationale="the configuration may be wrong: ZeRO with torch_autocast reports float32 and reduces in bfloat16",
        measurement=(
            "the wrapper's own policy (FSDP reduce_dtype, DDP communication hook, DeepSpeed communication_data_type) "
            "compared with the collectives of a step"
        ),
        repair=(
            "set the intended dtype in the option that is used (DeepSpeed: lower_precision_safe_modules: []), and audit again"
        ),
        references=("DeepSpeed 0.19 torch_autocast",),
        sections=("collectives", "setup"),
        check=_unconfigured_reduction,
        missing_evidence=_no_reduction,
    ),
    Rule(
        code="BXP304",
        title="clipping acts on gradients that the optimizer does not read",
        severity="error",
        rationale=(
            "a norm is reported, and the step uses unclipped gradients, for example when live gradients are clipped after they "
            "were copied to the masters"
        ),
        measurement=(
            "norm of the gradients inside the optimizer's step, compared with the norm that clipping reported and its limit; "
            "whether a GradScaler unscaled the gradients after they were clipped"
        ),
        repair=(
            "clip after the upcast to the masters (MasterWeightOptimizer.clip_grad_norm_), right before the step; with a "
            "GradScaler, call scaler.unscale_(optimizer) before clipping"
        ),
        repairs=CLIPPING_BY_LIBRARY,
        locations=("optimizer",),
        references=("OpenTau#186",),
        sections=("steps", "clip", "numbers"),
        check=_ineffective_clipping,
        missing_evidence=_norms_uncompared,
    ),
    Rule(
        code="BXP305",
        title="float16 is trained without loss scaling",
        severity="error",
        rationale="float16 gradients below 6e-8 are zero; without a scaler small ones vanish unnoticed",
        measurement=(
            "dtypes of gradients and products, calls of a GradScaler or DeepSpeed's loss scaler, and the steps it skipped"
        ),
        repair=(
            "train in bfloat16, or scale the loss (torch.amp.GradScaler); if every step is skipped the scaled loss "
            "overflows: lower init_scale"
        ),
        repairs=SCALING_BY_LIBRARY,
        locations=("cast", "default dtype"),
        references=("arXiv:1710.03740",),
        sections=("stepped", "scaler"),
        check=_unscaled_float16,
    ),
)
