"""BXP2xx: the optimizer's moments, its epsilon and its step counter."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from benchbox.audit.rules.base import (
    CAST_OR_BUILT,
    Rule,
    RuleViolation,
    abbreviate,
    moments_rounded_between_steps,
    names_evidence,
    round_share,
    share_violations,
    tensor_violations,
)
from benchbox.observer.facts import SIXTEEN_BIT
from benchbox.observer.stepped_tensors import all_stepped_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import RankFacts, SteppedTensor

# Decay multiplies v by beta2. Half a unit in bfloat16's last place is between 2^-9 and 2^-8 of the value: a decay smaller than
# the first is rounded back for every mantissa, one smaller than the second for some.
_ALWAYS_STALLS = 2.0**-9
_MAY_STALL = 2.0**-8
_SECOND_MOMENT = "exp_avg_sq"
# Stored in blocks that share a scale, as by bitsandbytes and torchao; "master_param" in int16 is half of a number instead.
_QUANTISED = frozenset({"uint8", "int8", "uint4", "float8_e4m3fn", "float8_e5m2"})
# bfloat16 moments beside float32 weights at this beta2 or less: DeepSeek-V3 (arXiv:2412.19437) trained so.
_FAST_BETA2 = 0.995


def _stall_severity(tensor: SteppedTensor) -> Severity | None:
    is_rounded = tensor.state.get(_SECOND_MOMENT) == "bfloat16" or _SECOND_MOMENT in moments_rounded_between_steps(tensor)
    if not is_rounded or tensor.betas is None:
        return None
    decay = 1.0 - tensor.betas[1]
    if decay <= _ALWAYS_STALLS:
        return "error"
    return "warning" if decay < _MAY_STALL else None


def _storage(tensor: SteppedTensor) -> str:
    is_rounded = _SECOND_MOMENT in moments_rounded_between_steps(tensor)
    return "float32, rounded to bfloat16 after every step" if is_rounded else "bfloat16"


def _second_moment_stalls(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        stalled = [t.numbers.second_moment_stalled for t in tensors if t.numbers.second_moment_stalled is not None]
        measured = {"share of v that cannot decay": round_share(max(stalled))} if stalled else {}
        return {
            "state": "; ".join(dict.fromkeys(f"{_SECOND_MOMENT} in {_storage(tensor)}" for tensor in tensors)),
            "beta2": sorted({t.betas[1] for t in tensors if t.betas}),
        } | measured

    return tensor_violations(facts, _stall_severity, evidence)


def _sixteen_bit_moments(tensor: SteppedTensor) -> list[str]:
    return [name for name, dtype in tensor.state.items() if name != "step" and dtype in SIXTEEN_BIT]


def _quantised_state(tensor: SteppedTensor) -> list[str]:
    return [name for name, dtype in tensor.state.items() if dtype in _QUANTISED]


def _low_precision_moments(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    yield from _sixteen_bit_violations(facts)
    for violation in tensor_violations(
        facts,
        lambda tensor: "info" if _quantised_state(tensor) else None,
        lambda tensors: {"state": abbreviate(f"{name} in {t.state[name]}" for t in tensors for name in _quantised_state(t))},
    ):
        yield violation._replace(title="the state of the optimizer is quantised, by its design")


def _sixteen_bit_violations(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        if not _sixteen_bit_moments(tensor) or tensor.compensation is not None or _stall_severity(tensor) is not None:
            return None  # BXP201 reports those that stall
        forgets = tensor.betas is not None and tensor.betas[1] <= _FAST_BETA2
        return "info" if tensor.dtype == "float32" and forgets else "warning"

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        state = abbreviate(f"{name} in {tensor.state[name]}" for tensor in tensors for name in _sixteen_bit_moments(tensor))
        return {"state": state, "beta2": sorted({tensor.betas[1] for tensor in tensors if tensor.betas})}

    return tensor_violations(facts, severity, evidence)


def _underflow(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def share(tensor: SteppedTensor) -> float | None:
        return tensor.numbers.second_moment_zero if tensor.state.get(_SECOND_MOMENT) == "float16" else None

    return share_violations(facts, share, "share of v that is zero where the gradient is not")


def _flushes_to_zero(value: float, dtype: str) -> bool:
    """Return whether a positive number becomes zero in a dtype."""
    if dtype == "float16":
        return float(struct.unpack("e", struct.pack("e", value))[0]) == 0.0
    return value < 2.0**-134 if dtype == "bfloat16" else value < 2.0**-150


def _lost_epsilon(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        # A fused kernel adds it in float32.
        dtype = "float32" if tensor.fused else tensor.state.get(_SECOND_MOMENT, tensor.dtype)
        return "error" if tensor.eps and _flushes_to_zero(tensor.eps, dtype) else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "eps": sorted({tensor.eps for tensor in tensors if tensor.eps}),
            "state": abbreviate(f"{_SECOND_MOMENT} in {tensor.state.get(_SECOND_MOMENT, tensor.dtype)}" for tensor in tensors),
        }

    return tensor_violations(facts, severity, evidence)


def _lossy_counter(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        return "error" if tensor.state.get("step") in SIXTEEN_BIT else None

    yield from tensor_violations(
        facts, severity, lambda tensors: {"step": abbreviate(tensor.state["step"] for tensor in tensors)}
    )
    counts: dict[tuple[str, str], dict[int, float]] = {}
    observed_steps = {rank_facts.rank: len(rank_facts.steps) for rank_facts in facts}
    for rank, tensor in all_stepped_tensors(facts):
        # A rank that was observed for fewer steps than the others (it ended earlier) has a lower count.
        if tensor.step_count is not None and observed_steps[rank] == max(observed_steps.values()):
            counts.setdefault((tensor.optimizer, tensor.name), {})[rank] = tensor.step_count
    differing = {key: by_rank for key, by_rank in counts.items() if len(set(by_rank.values())) > 1}
    if differing:
        (optimizer, _), by_rank = next(iter(differing.items()))
        evidence = {
            "steps": [f"rank {rank}: {count:g}" for rank, count in sorted(by_rank.items())],
            **names_evidence(name for _, name in differing),
        }
        yield RuleViolation("error", optimizer, min(by_rank), evidence, "ranks disagree on how many steps were taken")


RULES = (
    Rule(
        code="BXP201",
        title="the second moment is bfloat16 and cannot decay",
        severity="error",
        conditions="error where no second moment can decay (1 - beta2 at most 2^-9), warning where some cannot (below 2^-8)",
        rationale=(
            "v * beta2 rounds back to v: v only ever rises, so after gradients fall the steps stay too small; "
            "at beta2 0.999 every mantissa is affected, at 0.998 most, at 0.996 none"
        ),
        measurement=(
            "dtype of exp_avg_sq after the step, and whether bfloat16 holds all of a float32 one exactly before a later "
            "observed step; beta2 of the parameter group it belongs to; on all ranks"
        ),
        repair="keep optimizer state in float32 (recipe bf16_master), or lower beta2 to 0.995 or less",
        locations=CAST_OR_BUILT,
        references=("OpenTau#181", "AReaL#1292"),
        sections=("stepped", "options"),
        consequence_of=("BXP101",),
        check=_second_moment_stalls,
    ),
    Rule(
        code="BXP202",
        title="moments are stored in 16 bits",
        severity="warning",
        conditions="warning; info over float32 weights at a beta2 of at most 0.995, and for quantised state",
        rationale=(
            "rounding adds noise to the mean and bias to the square; with float32 weights and beta2 of 0.995 or less training "
            "has been shown to tolerate it (DeepSeek-V3), and optimizers that round stochastically are designed for it"
        ),
        measurement="dtype of every state tensor after the step, on all ranks",
        repair="keep optimizer state in float32 unless the memory is needed, and then keep beta2 at 0.995 or less",
        locations=CAST_OR_BUILT,
        references=("arXiv:2412.19437",),
        sections=("stepped", "options"),
        consequence_of=("BXP101",),
        check=_low_precision_moments,
    ),
    Rule(
        code="BXP203",
        title="the second moment underflows: v is zero where the gradient is not",
        severity="error",
        rationale=(
            "float16 has nothing between 0 and 6e-8: (1 - beta2) x g^2 is zero for gradients below 0.0055 at beta2 0.999, and "
            "the update is then m / eps"
        ),
        measurement="float16 exp_avg_sq after the step, where the gradient of that step is not zero",
        repair="keep optimizer state in float32; loss scaling cannot help, because it is undone before the moments",
        locations=CAST_OR_BUILT,
        references=("pytorch#147437",),
        sections=("stepped", "numbers"),
        check=_underflow,
    ),
    Rule(
        code="BXP204",
        title="epsilon is zero in the dtype it is added in",
        severity="error",
        rationale=(
            "float16 flushes 1e-8 to zero, and where the gradient is zero too Adam divides 0 by 0: NaN in the for-loop and "
            "foreach implementations, not in the fused one; bfloat16 holds 1e-8"
        ),
        measurement="eps of the parameter group, cast to the dtype of the second moment; to float32 of a fused optimizer",
        repair="keep optimizer state in float32, or raise eps to 1e-7 or more",
        locations=CAST_OR_BUILT,
        references=("pytorch#147437",),
        sections=("stepped", "options"),
        check=_lost_epsilon,
    ),
    Rule(
        code="BXP205",
        title="the step counter is stored in 16 bits",
        severity="error",
        rationale=(
            "bfloat16 cannot count beyond 256, float16 not beyond 2048: bias correction and schedules then stop advancing"
        ),
        measurement="dtype of the optimizer's step after the step, and whether ranks agree on it",
        repair=(
            "keep the counter in float32 or as an integer, and cast models by parameters and buffers, not their "
            "optimizer's state"
        ),
        locations=CAST_OR_BUILT,
        references=("speculators#899",),
        sections=("stepped",),
        check=_lossy_counter,
    ),
)
