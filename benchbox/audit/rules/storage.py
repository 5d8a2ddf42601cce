"""BXP1xx: storage of the tensors that the optimizer steps, and loss of their updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.repairs import MASTERS, MASTERS_BY_LIBRARY, RETUNE
from benchbox.audit.rules.base import (
    CAST_OR_BUILT,
    MAX_NAMES,
    Rule,
    RuleViolation,
    abbreviate,
    is_lossy,
    is_weight_rounded_between_steps,
    masters_uncompared,
    names_evidence,
    rms_update,
    round_share,
    share_violations,
    tensor_violations,
)
from benchbox.audit.thresholds import EDQ_ERROR, EDQ_WARNING
from benchbox.observer.stepped_tensors import all_stepped_tensors, edq

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import RankFacts, SteppedTensor, UpdateStatistics

# Half a unit in the last place of bfloat16 is between 2^-9 and 2^-8 of a number: a smaller change certainly vanishes.
_VANISHES = 2.0**-9
_EDQ_NEAR_ONE = 0.95
_PINNED_STEPS = 3
# A tensor of so few elements may keep its value by chance, or have next to no gradient.
_MAX_TRIVIAL_ELEMENTS = 1
# A float32 weight below 16 takes every update of this size; with smaller ones, as in a warm-up, a constant weight is no fault.
_FLOAT32_EFFECTIVE = 2.0**-20
# optimi and torchdistx compensate for the rounding of an update, and decay weights outside of that sum.
_KAHAN = "Kahan"
# Of an average that is written to, in a sample of elements, over so many steps.
_AVERAGED_STEPS, _MIN_LAGGING, _STUCK_SHARE = 2, 32, 0.5
_UNKNOWN_TITLE = "the optimizer steps 16-bit tensors, and it is unknown whether it keeps what rounding loses"
_UNCOMPUTED = "no update was computed beside the real one: the observer knows the arithmetic of Adam, AdamW and SGD"


def _is_adapter(tensor: SteppedTensor) -> bool:
    """Return whether peft or a similar library named the tensor; a `vision_adapter` may be as wide as the model."""
    return any(part.startswith(("lora_", "adapter_")) or part == "adapters" for part in tensor.name.split("."))


def _sixteen_bit_steps(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    yield from _sixteen_bit_dtypes(facts)
    for violation in tensor_violations(
        facts,
        lambda tensor: "error" if is_weight_rounded_between_steps(tensor) else None,
        lambda tensors: {
            "share of moved elements that bfloat16 holds exactly": 1.0,
            "steps before they were compared": max(tensor.numbers.steps_before_later or 0 for tensor in tensors),
        },
    ):
        title = "weights are float32 by type, and rounded to bfloat16 after every step"
        repair = "keep the float32 weights, and cast a copy of them where bfloat16 is needed"
        yield violation._replace(title=title, repair=repair)


def _sixteen_bit_dtypes(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    opaque = {optimizer.optimizer for rank_facts in facts for optimizer in rank_facts.opaque}

    def severity(tensor: SteppedTensor) -> Severity | None:
        if not is_lossy(tensor):
            return None
        if tensor.optimizer in opaque:
            return "unknown"
        if not _is_adapter(tensor):
            return "error"
        # Adapters are small, start at zero and are trained at large rates: 16 bits may do.
        return "info" if (edq([tensor.numbers]) or 0.0) >= _EDQ_NEAR_ONE else "warning"

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        combined = edq([tensor.numbers for tensor in tensors])
        state = abbreviate(f"{name} in {dtype}" for tensor in tensors for name, dtype in sorted(tensor.state.items()))
        return {"state": state} | ({} if combined is None else {"edq": round(combined, 4)})

    for violation in tensor_violations(facts, severity, evidence):
        yield violation._replace(title=_UNKNOWN_TITLE) if violation.severity == "unknown" else violation


def _lossy_tensors(facts: Sequence[RankFacts]) -> dict[str, list[tuple[int, SteppedTensor]]]:
    """Return (rank, tensor) of the 16-bit tensors without compensation, by optimizer."""
    by_optimizer: dict[str, list[tuple[int, SteppedTensor]]] = {}
    for rank, tensor in all_stepped_tensors(facts):
        if is_lossy(tensor):
            by_optimizer.setdefault(tensor.optimizer, []).append((rank, tensor))
    return by_optimizer


def _lost_updates(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Judge all lossy tensors of an optimizer together: single small ones may be noisy."""
    for optimizer, lossy in _lossy_tensors(facts).items():
        updated = [(rank, tensor) for rank, tensor in lossy if tensor.numbers.update_squared > 0.0]
        statistics = [tensor.numbers for _, tensor in updated]
        combined = edq(statistics)
        if combined is None or combined >= EDQ_WARNING:
            continue
        lost = sum(numbers.updates_lost for numbers in statistics) / sum(numbers.updates for numbers in statistics)
        by_name: dict[str, list[UpdateStatistics]] = {}
        for _, tensor in updated:
            by_name.setdefault(tensor.name, []).append(tensor.numbers)
        edqs = {name: edq(of_name) or 0.0 for name, of_name in by_name.items()}
        worst = sorted(edqs, key=edqs.__getitem__)
        yield RuleViolation(
            "error" if combined < EDQ_ERROR else "warning",
            optimizer,
            min(rank for rank, _ in updated),
            {
                "edq": round(combined, 4),
                "share of updates lost": round_share(lost),
                "lr": sorted({tensor.lr for _, tensor in updated if tensor.lr is not None}),
                "steps looked at": max(numbers.steps for numbers in statistics),
                "ranks": sorted({rank for rank, _ in updated}),
                **names_evidence(worst),
                "edq of these": [round(edqs[name], 4) for name in worst[:MAX_NAMES]],
            },
        )


def _updates_uncomputed(facts: Sequence[RankFacts]) -> str | None:
    """Return a reason for optimizers whose updates were not computed: how many were lost is unknown."""
    by_optimizer = _lossy_tensors(facts).items()
    unknown = [name for name, lossy in by_optimizer if edq([tensor.numbers for _, tensor in lossy]) is None]
    unknown += [opaque.optimizer for rank_facts in facts for opaque in rank_facts.opaque]
    return (_changed_gradients(facts) or f"{', '.join(dict.fromkeys(unknown))}: {_UNCOMPUTED}") if unknown else None


def _changed_gradients(facts: Sequence[RankFacts]) -> str | None:
    """Return why the gradients of a step are unknown, None if they are known."""
    return next((step.changed_gradients for rank_facts in facts for step in rank_facts.steps if step.changed_gradients), None)


def _pinned(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        pinned = tensor.numbers.pinned_steps >= _PINNED_STEPS and tensor.elements > _MAX_TRIVIAL_ELEMENTS
        if not pinned or tensor.compensation is not None:
            return None
        return "error" if is_lossy(tensor) or (rms_update(tensor.numbers) or 0.0) >= _FLOAT32_EFFECTIVE else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "steps without a change": max(tensor.numbers.pinned_steps for tensor in tensors),
            "update, root mean square": float(f"{max(rms_update(tensor.numbers) or 0.0 for tensor in tensors):.3g}"),
        }

    return tensor_violations(facts, severity, evidence)


def _too_few_steps(facts: Sequence[RankFacts]) -> str | None:
    stepped = [tensor for _, tensor in all_stepped_tensors(facts)]
    if max((len(rank_facts.steps) for rank_facts in facts), default=0) < _PINNED_STEPS:
        return f"fewer than {_PINNED_STEPS} steps were seen"
    computed = {tensor.optimizer for tensor in stepped if tensor.numbers.updates}
    uncomputed = dict.fromkeys(tensor.optimizer for tensor in stepped if tensor.optimizer not in computed)
    return (_changed_gradients(facts) or f"{', '.join(uncomputed)}: {_UNCOMPUTED}") if uncomputed else None


def _live_differs(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def share(tensor: SteppedTensor) -> float | None:
        return tensor.numbers.live_differs if tensor.compensation is None else None

    return share_violations(facts, share, "share of elements that differ")


def _live_device_unknown(facts: Sequence[RankFacts]) -> str | None:
    if all(tensor.live_device is None for _, tensor in all_stepped_tensors(facts)):
        return "the device of the live parameters was not observed"
    return None


def _other_device(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        if tensor.offload is not None or tensor.live_device is None:
            return None
        devices = (tensor.device, *tensor.state_devices.values())
        return "error" if any(device != tensor.live_device for device in devices) else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "live": sorted({str(tensor.live_device) for tensor in tensors}),
            "stepped": sorted({tensor.device for tensor in tensors}),
            "state": sorted({device for tensor in tensors for device in tensor.state_devices.values()}),
        }

    return tensor_violations(facts, severity, evidence)


def _decay_per_step(tensor: SteppedTensor) -> float:
    return (tensor.lr or 0.0) * (tensor.weight_decay or 0.0)


def _decay_lost(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        is_rounded = is_lossy(tensor) or (tensor.compensation or "").startswith(_KAHAN)
        # Decay that is added to the gradient, as in SGD, arrives or is lost with it. Old checkpoints do not record the kind.
        is_decoupled = tensor.betas is not None if tensor.decoupled_decay is None else tensor.decoupled_decay
        # So does that of a fused kernel, which rounds the sum of both. Beside Kahan summation the decay comes first.
        is_apart = is_decoupled and not (tensor.fused and is_lossy(tensor))
        return "warning" if is_rounded and is_apart and 0.0 < _decay_per_step(tensor) < _VANISHES else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {"lr x weight decay": float(f"{max(map(_decay_per_step, tensors)):.3g}"), "least that arrives": _VANISHES}

    return tensor_violations(facts, severity, evidence)


def _stuck_averages(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        watched = [a for a in rank_facts.averages if a.written and a.lagging and a.steps >= _AVERAGED_STEPS]
        stuck, lagging = sum(average.stuck for average in watched), sum(average.lagging for average in watched)
        if lagging >= _MIN_LAGGING and stuck >= _STUCK_SHARE * lagging:
            evidence = {
                "share that no step changed, of elements that lag": round_share(stuck / lagging),
                "steps": max(average.steps for average in watched),
                "dtypes": sorted({average.dtype for average in watched}),
                **names_evidence(average.parameter for average in watched),
            }
            yield RuleViolation("error", watched[0].name, rank_facts.rank, evidence)
            return


RULES = (
    Rule(
        code="BXP101",
        title="the optimizer steps 16-bit tensors, and nothing keeps what rounding loses",
        severity="error",
        conditions=("error; of adapters a warning, and info where nearly every update arrives; unknown where the optimizer is"),
        rationale=(
            "bfloat16 keeps 8 significant bits: an update below 2^-9 of its weight is rounded away, however often it comes"
        ),
        measurement=(
            "dtype of every tensor the innermost optimizer updates, read on all ranks inside its step; of a float32 one, "
            "whether bfloat16 holds every element exactly that has moved before a later observed step"
        ),
        repair=MASTERS,
        repairs=MASTERS_BY_LIBRARY,
        afterwards=RETUNE,
        locations=CAST_OR_BUILT,
        references=("OpenTau#181", "accelerate#3979", "accelerate#2624", "transformers#42805", "AReaL#1292"),
        sections=("stepped",),
        check=_sixteen_bit_steps,
    ),
    Rule(
        code="BXP102",
        title="updates are lost: what arrives in the weights is not what the optimizer meant",
        severity="error",
        conditions=f"error where the effective descent quality is below {EDQ_ERROR}, warning below {EDQ_WARNING}",
        rationale=(
            "a 16-bit weight takes an update only if it reaches half a unit in its last place; the effective descent quality "
            "(EDQ) <u, what arrived> / |u|^2 is 1 when every update arrives and 0 when none does"
        ),
        measurement=(
            "each update computed in float32 from the same weight, gradient and state, compared with the change of the "
            "stored weight "
            "in the probed steps; elements without a gradient do not count"
        ),
        repair=MASTERS,
        repairs=MASTERS_BY_LIBRARY,
        afterwards=RETUNE,
        locations=CAST_OR_BUILT,
        references=("arXiv:2405.03637", "AReaL#1634"),
        sections=("stepped", "numbers"),
        consequence_of=("BXP101",),
        check=_lost_updates,
        missing_evidence=_updates_uncomputed,
    ),
    Rule(
        code="BXP103",
        title="a parameter is pinned: it stays bit-identical although its updates are not zero",
        severity="error",
        rationale=(
            "a norm weight stored as 1.0 in bfloat16 cannot decrease at a learning rate below 0.00195, nor increase "
            "below 0.0039"
        ),
        measurement=(
            "the stored tensor before the first and after the last observed step, bit by bit, and the updates in between"
        ),
        repair=f"{MASTERS}, at least for this parameter",
        repairs=MASTERS_BY_LIBRARY,
        afterwards=RETUNE,
        locations=CAST_OR_BUILT,
        references=("OpenTau#181",),
        sections=("stepped", "numbers"),
        consequence_of=("BXP101",),
        check=_pinned,
        missing_evidence=_too_few_steps,
    ),
    Rule(
        code="BXP104",
        title="the live parameters are not the rounded masters",
        severity="error",
        rationale="the model then computes with weights that are not the trained ones",
        measurement="local shards of live parameters, compared with the masters cast to their dtype, after steps",
        repair="copy the masters into the live parameters after every step, and change weights nowhere else",
        locations=("optimizer",),
        references=("OpenTau#186",),
        sections=("stepped", "links"),
        check=_live_differs,
        missing_evidence=lambda facts: masters_uncompared(facts, lambda numbers: numbers.live_differs),
    ),
    Rule(
        code="BXP105",
        title="masters or optimizer state are on another device than the live parameters",
        severity="error",
        rationale=(
            "every step then waits for copies between devices; it happens when masters are made before the model is moved"
        ),
        measurement="devices of stepped tensors, of their state, and of the corresponding live parameters",
        repair=(
            "make masters after the model is on its device, or declare the offload to the backend that does it asynchronously"
        ),
        locations=("optimizer",),
        references=("OpenTau#186",),
        sections=("stepped", "links"),
        missing_evidence=_live_device_unknown,
        check=_other_device,
    ),
    Rule(
        code="BXP106",
        title="weight decay is lost to rounding",
        severity="warning",
        rationale=(
            "decay multiplies a weight by 1 - lr x weight_decay: closer to 1 than 2^-9 the product is rounded back to the "
            "weight; Kahan summation does not help where weights are decayed outside of it, as optimi and torchdistx do; a "
            "fused kernel rounds the sum of decay and update, so that both arrive or neither"
        ),
        measurement="learning rate and decoupled weight decay of 16-bit tensors that are stepped, by no fused kernel",
        repair=MASTERS,
        repairs=MASTERS_BY_LIBRARY,
        afterwards=RETUNE,
        locations=CAST_OR_BUILT,
        references=("OpenTau#181", "arXiv:2405.03637"),
        sections=("stepped", "options"),
        consequence_of=("BXP101",),
        check=_decay_lost,
    ),
    Rule(
        code="BXP107",
        title="an average of the weights stands still: its updates are lost to rounding",
        severity="error",
        rationale=(
            "an EMA moves by (1 - decay) of the difference to the weights: at a decay of 0.999 a bfloat16 average takes no "
            "update until the weight is 250 to 500 units in the last place away"
        ),
        measurement=(
            "averages beside the model, before and after observed steps: elements eight units in the last place or "
            "more from their weight that no step changed, although the average was written to"
        ),
        repair="keep the average in float32, and cast it only to evaluate or to save it",
        references=("arXiv:2405.03637",),
        sections=("averages",),
        check=_stuck_averages,
    ),
)
