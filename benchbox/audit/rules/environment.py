"""BXP6xx: what surrounds the step: autocast, buffers, defaults, and what was declared."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from benchbox.audit.rules.base import SIXTEEN_BIT, RuleViolation, Rule, names_evidence
from benchbox.observer.facts import all_stepped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.observer.facts import Contract, RankFacts, SteppedTensor

_MIXED = {"bf16": "bfloat16", "fp16": "float16", "no": None}
# Rounded, these change what the model computes for every input: rotary angles, running and dataset statistics.
_SENSITIVE = (
    "*inv_freq*",
    "*freqs*",
    "*rotary*",
    "*rope*",
    "*running_mean",
    "*running_var",
    "*normal*mean*",
    "*normal*std*",
    "*stats*",
    "*statistics*",
    "*quantile*",
)
# Of the products of a forward pass; a few may be kept in float32 on purpose.
_MOST = 0.5


def _autocast(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        wanted, source = _wanted_compute(each)
        total = sum(each.products.values())
        if wanted is not None and total and each.products.get(wanted, 0) < _MOST * total:
            evidence = {"requested": f"{wanted}, by {source}", "products": _counted(each.products), "autocast": _active(each)}
            yield RuleViolation("warning", "forward pass", each.rank, evidence)
            return
        unrequested = each.autocast is not None and each.autocast.active and _declares_none(each)
        if unrequested:
            evidence = {"requested": f"none, by {source}", "products": _counted(each.products), "autocast": _active(each)}
            yield RuleViolation(
                "warning", "forward pass", each.rank, evidence, "autocast is active though it was not requested"
            )
            return


def _wanted_compute(facts: RankFacts) -> tuple[str | None, str | None]:
    """The dtype that products were to have, and who said so."""
    if facts.contract is not None and facts.contract.compute is not None:
        return facts.contract.compute, facts.contract.source
    if facts.setup is not None and facts.setup.mixed_precision is not None:
        return _MIXED.get(facts.setup.mixed_precision), f"{facts.setup.source} mixed_precision={facts.setup.mixed_precision!r}"
    return None, None


def _declares_none(facts: RankFacts) -> bool:
    if facts.contract is not None and facts.contract.compute is not None:
        return facts.contract.compute == "float32"
    return facts.setup is not None and facts.setup.mixed_precision == "no"


def _no_products(facts: Sequence[RankFacts]) -> str | None:
    return None if any(each.products for each in facts) else "no matrix product was seen in a forward pass"


def _counted(products: dict[str, int]) -> list[str]:
    return [f"{count} in {dtype}" for dtype, count in sorted(products.items())]


def _active(facts: RankFacts) -> str:
    if facts.autocast is None:
        return "not seen"
    return f"active, {facts.autocast.dtype}" if facts.autocast.active else "inactive"


def _low_buffers(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        found = [
            buffer
            for buffer in each.buffers
            if buffer.dtype in SIXTEEN_BIT and any(fnmatchcase(buffer.name.lower(), pattern) for pattern in _SENSITIVE)
        ]
        if found:
            evidence = {
                "buffers": len(found),
                "dtypes": sorted({buffer.dtype for buffer in found}),
                **names_evidence(buffer.name for buffer in found),
            }
            yield RuleViolation("warning", "buffers", each.rank, evidence)
            return


def _low_default(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        if each.default_dtype is not None and each.default_dtype != "float32":
            yield RuleViolation("warning", "torch.get_default_dtype()", each.rank, {"default": each.default_dtype})
            return


def _broken_contract(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    yield from _unknowns(facts)
    contract = next((each.contract for each in facts if each.contract is not None), None)
    if contract is None:
        return
    found: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for place, declared, rank, dtype, name in _measured(facts, contract):
        if declared is not None and dtype not in (declared, "unknown"):
            found.setdefault((place, declared, dtype), []).append((rank, name))
    if found:
        ranks = sorted({rank for held in found.values() for rank, _ in held})
        evidence = {
            "differs": [f"{place}: {declared} declared, {dtype} measured" for place, declared, dtype in found],
            **names_evidence(name for held in found.values() for _, name in held),
            "ranks": ranks,
        }
        yield RuleViolation("error", contract.source, ranks[0], evidence)


def _measured(facts: Sequence[RankFacts], contract: Contract) -> Iterator[tuple[str, str | None, int, str, str]]:
    """(place, dtype declared for it, rank, dtype found, name of the tensor)."""
    for rank, tensor in all_stepped(facts):
        yield "stepped", contract.stepped, rank, _stepped_in(tensor), tensor.name
        for state, dtype in tensor.state.items():
            if state not in {"step", "master_param"}:
                yield "moments", contract.moments, rank, dtype, tensor.name
    for each in facts:
        for parameter in each.parameters:
            if parameter.trainable:
                yield "storage", contract.storage, each.rank, parameter.dtype, parameter.name


def _stepped_in(tensor: SteppedTensor) -> str:
    """The dtype that updates add up in: that of a master in the optimizer's state, where one is kept there. An int16 master is
    the lower half of a float32 number whose upper half is the bfloat16 tensor itself.
    """
    master = tensor.state.get("master_param", tensor.dtype)
    return "float32" if master == "int16" else master


def _unknowns(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for each in facts:
        for opaque in each.opaque:
            ranks.setdefault((opaque.optimizer, opaque.reason), []).append(each.rank)
        if each.problems and "stepped" in each.missing:
            ranks.setdefault(("the witness", f"it failed before it could say: {each.problems[0]}"), []).append(each.rank)
    for (optimizer, reason), seen in ranks.items():
        evidence = {"reason": reason, "ranks": sorted(seen)}
        yield RuleViolation(
            "unknown", optimizer, min(seen), evidence, "what the optimizer does could not be read: it may lose precision"
        )


RULES = (
    Rule(
        code="BXP601",
        title="the forward pass does not compute in the dtype that was requested",
        severity="warning",
        rationale="an autocast around the wrong code, or for another device, changes nothing and says nothing",
        measurement="dtypes of the matrix products of a forward pass, and whether autocast was on in it, against the request",
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
        measurement="dtype of buffers by name, on all ranks",
        repair="cast parameters, not modules: keep these buffers in float32, or compute them in float32 when they are used",
        references=("transformers#25681",),
        sections=("buffers",),
        check=_low_buffers,
    ),
    Rule(
        code="BXP603",
        title="torch's default dtype is not float32",
        severity="warning",
        rationale="everything made without a dtype is then made in 16 bits, masks, positions and statistics included",
        measurement="torch.get_default_dtype() in the training process",
        repair="set the default dtype only around the construction of the model (torch.set_default_dtype in a try/finally)",
        references=("transformers#28461",),
        sections=("process",),
        check=_low_default,
    ),
    Rule(
        code="BXP604",
        title="what was declared is not what runs",
        severity="error",
        rationale="a precision that is only configured is not measured: a warning said upcast and did nothing",
        measurement=(
            "the declared recipe against the dtypes of stepped tensors and their state; optimizers that cannot be read "
            "are unknown"
        ),
        repair=(
            "change the set-up until it measures what is declared, or declare what is meant; audit with an optimizer "
            "that is known"
        ),
        references=("accelerate#3979", "apex#1728"),
        sections=("stepped",),
        check=_broken_contract,
    ),
)
