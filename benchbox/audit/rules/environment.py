"""BXP6xx: environment of the step: autocast, buffers, defaults, and the declared precision."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from benchbox.audit.rules.base import Rule, RuleViolation, names_evidence
from benchbox.observer.facts import SIXTEEN_BIT, OpaqueOptimizer
from benchbox.observer.stepped_tensors import all_stepped_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.observer.facts import Contract, LiveTensor, RankFacts, SteppedTensor

_MIXED_PRECISION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "no": None}
# Rounding these changes every output of the model: rotary angles, running and dataset statistics. Names are matched by their
# parts between dots and underscores: "rope" is no part of "property".
_SENSITIVE_NAME = re.compile(
    r"(^|[._])(inv_freqs?|freqs|rotary|m?rope(\d?d)?|running_(mean|var)|stats|statistics|quantiles?)([._]|$)"
    r"|normal[^.]*[._](.*[._])?(mean|std)([._]|$)|_(mean|std|var)$"
)
# Statistics by their own name, if they are inside a module called a normaliser.
_NORMALISER = re.compile(r"(un|de|re)?normali[sz]|standardi[sz]|whiten", re.IGNORECASE)
_STATISTICS = frozenset({"mean", "std", "var", "min", "max", "scale", "offset", "shift", "q01", "q99", "q10", "q90"})
_LEAVE_AUTOCAST_OFF = (
    'leave autocast off (accelerate\'s mixed_precision="no", no torch.autocast around the forward pass), or declare '
    "computation under autocast (recipe fp32_autocast)"
)
_REMOVE_CASTS = "remove the casts of parameters and inputs to 16 bits, or declare the dtype that is meant (another recipe)"
# A complex number is two of these.
_REAL = {"complex64": "float32", "complex128": "float64"}
# Least share of the matrix products of a forward pass; some may be float32 on purpose.
_MIN_SHARE = 0.5


def _autocast(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        requested, source = _requested_compute(rank_facts)
        products = rank_facts.products
        total = sum(products.values())
        observed = {"products": _product_counts(products), "autocast": _autocast_state(rank_facts)}
        if rank_facts.autocast is not None and rank_facts.autocast.active and _declares_no_autocast(rank_facts):
            evidence = {"requested": f"{requested or 'none'}, by {source}", **observed}
            title = "autocast is active though it was not requested"
            yield RuleViolation("warning", "forward pass", rank_facts.rank, evidence, title, _LEAVE_AUTOCAST_OFF)
            return
        if requested is not None and total and products.get(requested, 0) < _MIN_SHARE * total:
            evidence = {"requested": f"{requested}, by {source}", **observed}
            repair = _REMOVE_CASTS if requested == "float32" else None
            yield RuleViolation("warning", "forward pass", rank_facts.rank, evidence, repair=repair)
            return


def _requested_compute(facts: RankFacts) -> tuple[str | None, str | None]:
    """Return the requested dtype of matrix products, and the source of the request."""
    if facts.contract is not None and facts.contract.compute is not None:
        return facts.contract.compute, facts.contract.source
    if facts.setup is not None and facts.setup.mixed_precision is not None:
        dtype = _MIXED_PRECISION_DTYPES.get(facts.setup.mixed_precision)
        return dtype, f"{facts.setup.source} mixed_precision={facts.setup.mixed_precision!r}"
    return None, None


def _declares_no_autocast(facts: RankFacts) -> bool:
    if facts.contract is not None and facts.contract.compute is not None:
        return facts.contract.compute == "float32"
    return facts.setup is not None and facts.setup.mixed_precision == "no"


def _no_products(facts: Sequence[RankFacts]) -> str | None:
    return None if any(rank_facts.products for rank_facts in facts) else "no matrix product was seen in a forward pass"


def _product_counts(products: dict[str, int]) -> list[str]:
    return [f"{count} in {dtype}" for dtype, count in sorted(products.items())]


def _autocast_state(facts: RankFacts) -> str:
    if facts.autocast is None:
        return "not seen"
    return f"active, {facts.autocast.dtype}" if facts.autocast.active else "inactive"


def _low_precision_buffers(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        constants = [*rank_facts.buffers, *_constant_parameters(rank_facts)]
        buffers = [tensor for tensor in constants if tensor.dtype in SIXTEEN_BIT and _is_sensitive(tensor)]
        if buffers:
            evidence = {
                "buffers": len(buffers),
                "dtypes": sorted({buffer.dtype for buffer in buffers}),
                **names_evidence(buffer.name for buffer in buffers),
            }
            yield RuleViolation("warning", "buffers", rank_facts.rank, evidence)
            return


def _constant_parameters(facts: RankFacts) -> Iterator[LiveTensor]:
    """Yield the parameters that may be buffers in all but name: vectors that are known not to be trained.

    Matrices are frozen weights, as those below an adapter. A checkpoint may not show which parameters its optimizer trains.
    """
    if facts.source == "checkpoint" and not any(parameter.trainable for parameter in facts.parameters):
        return
    for parameter in facts.parameters:
        if not parameter.trainable and (parameter.ndim is None or parameter.ndim <= 1):
            yield parameter


def _is_sensitive(tensor: LiveTensor) -> bool:
    name = tensor.name.lower()
    if _SENSITIVE_NAME.search(name):
        return True
    path, _, own_name = name.rpartition(".")
    inside_normaliser = _NORMALISER.search(path) or _NORMALISER.search(tensor.module or "")
    return bool(inside_normaliser) and not _STATISTICS.isdisjoint(own_name.split("_"))


def _low_precision_default(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        dtype = rank_facts.default_dtype
        if dtype in SIXTEEN_BIT:
            yield RuleViolation("warning", "torch.get_default_dtype()", rank_facts.rank, {"default": dtype})
            return


def _broken_contract(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    yield from _unreadable_optimizers(facts)
    contract = next((rank_facts.contract for rank_facts in facts if rank_facts.contract is not None), None)
    if contract is None:
        return
    differences: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for role, declared, rank, dtype, name in _declared_and_measured(facts, contract):
        if declared is not None and _REAL.get(dtype, dtype) not in (declared, "unknown"):
            differences.setdefault((role, declared, dtype), []).append((rank, name))
    if differences:
        ranks = sorted({rank for tensors in differences.values() for rank, _ in tensors})
        evidence = {
            "differs": [f"{role}: {declared} declared, {dtype} measured" for role, declared, dtype in differences],
            **names_evidence(name for tensors in differences.values() for _, name in tensors),
            "ranks": ranks,
        }
        yield RuleViolation("error", contract.source, ranks[0], evidence)


def _declared_and_measured(facts: Sequence[RankFacts], contract: Contract) -> Iterator[tuple[str, str | None, int, str, str]]:
    """Yield (role, declared dtype, rank, measured dtype, name) of every tensor that a contract may declare."""
    for rank, tensor in all_stepped_tensors(facts):
        yield "stepped", contract.stepped, rank, _accumulation_dtype(tensor), tensor.name
        for state, dtype in tensor.state.items():
            if state not in {"step", "master_param"}:
                yield "moments", contract.moments, rank, dtype, tensor.name
    for rank_facts in facts:
        for parameter in rank_facts.parameters:
            if parameter.trainable:
                yield "storage", contract.storage, rank_facts.rank, parameter.dtype, parameter.name


def _accumulation_dtype(tensor: SteppedTensor) -> str:
    """Return the dtype that updates accumulate in: that of a master in the optimizer's state, if there is one.

    An int16 master is the lower half of a float32 number whose upper half is the bfloat16 tensor itself.
    """
    master = tensor.state.get("master_param", tensor.dtype)
    return "float32" if master == "int16" else master


def _unreadable_optimizers(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    ranks_by_optimizer: dict[OpaqueOptimizer, list[int]] = {}
    for rank_facts in facts:
        opaque = list(rank_facts.opaque)
        if rank_facts.problems and "stepped" in rank_facts.missing:
            reason = f"it failed before it could report: {rank_facts.problems[0]}"
            opaque.append(OpaqueOptimizer(optimizer="the observer", reason=reason))
        for optimizer in opaque:
            ranks_by_optimizer.setdefault(optimizer, []).append(rank_facts.rank)
    for optimizer, ranks in ranks_by_optimizer.items():
        evidence = {"reason": optimizer.reason, "ranks": sorted(set(ranks))}
        if optimizer.lossless:
            title = "the arithmetic of the optimizer is unknown; the float32 weights that it steps take any update"
            yield RuleViolation("info", optimizer.optimizer, min(ranks), evidence, title)
        else:
            title = "what the optimizer does could not be read: it may lose precision"
            yield RuleViolation("unknown", optimizer.optimizer, min(ranks), evidence, title)


RULES = (
    Rule(
        code="BXP601",
        title="the forward pass does not compute in the dtype that was requested",
        severity="warning",
        rationale="an autocast around the wrong code, or for another device, has no effect and gives no warning",
        measurement="dtypes of the matrix products of a forward pass, and whether autocast was on, compared with the request",
        repair="enter autocast (or accelerate's) around the forward pass itself, for the device the model is on",
        references=("lerobot#3912",),
        sections=("products", "autocast"),
        check=_autocast,
        missing_evidence=_no_products,
    ),
    Rule(
        code="BXP602",
        title="sensitive buffers are stored in 16 bits",
        severity="warning",
        rationale=(
            "rotary frequencies rounded to bfloat16 are off by whole positions far along a sequence, running statistics stop "
            "running, and normalisation statistics shift every input"
        ),
        measurement="dtype of buffers, and of vectors that are parameters and not trained, by name and owner, on all ranks",
        repair="cast parameters, not modules: keep these buffers in float32, or compute them in float32 when they are used",
        locations=("cast", "default dtype"),
        references=("transformers#25681",),
        sections=("buffers",),
        check=_low_precision_buffers,
    ),
    Rule(
        code="BXP603",
        title="torch's default dtype has 16 bits",
        severity="warning",
        rationale="tensors created without a dtype are then 16-bit, masks, positions and statistics included",
        measurement="torch.get_default_dtype() in the training process",
        repair="set the default dtype only around the construction of the model (torch.set_default_dtype in a try/finally)",
        locations=("default dtype",),
        references=("transformers#28461",),
        sections=("process",),
        check=_low_precision_default,
    ),
    Rule(
        code="BXP604",
        title="what was declared is not what runs",
        severity="error",
        conditions="error; unknown where an optimizer cannot be read; info where it cannot and steps only float32 weights",
        rationale="a configured precision is not a measured one: one library warned that it would upcast, and did not",
        measurement=(
            "the declared recipe, compared with the dtypes of stepped tensors and their state; optimizers that cannot be read "
            "are unknown"
        ),
        repair=(
            "change the set-up until the measured dtypes are the declared ones, or correct the declaration; audit with an "
            "optimizer that the observer supports"
        ),
        references=("accelerate#3979", "apex#1728"),
        sections=("stepped",),
        check=_broken_contract,
    ),
)
