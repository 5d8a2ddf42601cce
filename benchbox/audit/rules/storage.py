"""BXP1xx: what the optimizer steps, how it is stored, and whether its updates arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.rules.rule import RETUNE, Breach, Rule, breaches, is_lossy, judged, percent, shown
from benchbox.measure.witness.facts import all_stepped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.measure.witness.facts import RankFacts, SteppedTensor

_ADAPTER_MARKS = ("lora_", "adapter")
# Half a unit in bfloat16's last place is between 2^-9 and 2^-8 of a number: what is below the first certainly vanishes.
_VANISHES = 2.0**-9
_EDQ_ERROR, _EDQ_WARNING = 0.5, 0.9
_PINNED_STEPS = 3
# A tensor this small may stand still by chance, or have next to no gradient.
_FEW_ELEMENTS = 1


def _is_adapter(tensor: SteppedTensor) -> bool:
    return any(mark in tensor.name for mark in _ADAPTER_MARKS)


def _sixteen_bit_steps(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        if not is_lossy(tensor):
            return None
        return "warning" if _is_adapter(tensor) else "error"

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {"state": shown(f"{name} in {dtype}" for tensor in tensors for name, dtype in sorted(tensor.state.items()))}

    return breaches(judged(facts, severity), evidence)


def _lost_updates(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    """Over all lossy tensors of an optimizer together: single small ones may be noisy."""
    held: dict[str, list[tuple[int, SteppedTensor]]] = {}
    for rank, tensor in all_stepped(facts):
        if is_lossy(tensor) and tensor.numbers.update_squared > 0.0:
            held.setdefault(tensor.optimizer, []).append((rank, tensor))
    for optimizer, found in held.items():
        numbers = [tensor.numbers for _, tensor in found]
        edq = sum(each.update_dot for each in numbers) / sum(each.update_squared for each in numbers)
        if edq >= _EDQ_WARNING:
            continue
        lost = sum(each.updates_lost for each in numbers) / sum(each.updates for each in numbers)
        worst = sorted(found, key=lambda item: item[1].numbers.update_dot / item[1].numbers.update_squared)
        yield Breach(
            "error" if edq < _EDQ_ERROR else "warning",
            optimizer,
            min(rank for rank, _ in found),
            {
                "edq": round(edq, 4),
                "lost": f"{percent(lost)} of the updates left the stored weight as it was",
                "lr": sorted({tensor.lr for _, tensor in found if tensor.lr is not None}),
                "steps": max(each.steps for each in numbers),
                "ranks": sorted({rank for rank, _ in found}),
                "worst": shown(f"{tensor.name} ({_edq(tensor):.3f})" for _, tensor in worst),
            },
        )


def _edq(tensor: SteppedTensor) -> float:
    return tensor.numbers.update_dot / tensor.numbers.update_squared


def _pinned(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        pinned = tensor.numbers.pinned_steps >= _PINNED_STEPS and tensor.elements > _FEW_ELEMENTS
        return "error" if pinned and tensor.compensation is None else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {"steps": max(tensor.numbers.pinned_steps for tensor in tensors)}

    return breaches(judged(facts, severity), evidence)


def _live_differs(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        return "error" if (tensor.numbers.live_differs or 0.0) > 0.0 and tensor.compensation is None else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "differs": percent(max(tensor.numbers.live_differs or 0.0 for tensor in tensors)) + " of the elements looked at"
        }

    return breaches(judged(facts, severity), evidence)


def _other_device(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        if tensor.offload is not None or tensor.live_device is None:
            return None
        return (
            "error" if any(device != tensor.live_device for device in (tensor.device, *tensor.state_devices.values())) else None
        )

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "live": sorted({str(tensor.live_device) for tensor in tensors}),
            "stepped": sorted({tensor.device for tensor in tensors}),
            "state": sorted({device for tensor in tensors for device in tensor.state_devices.values()}),
        }

    return breaches(judged(facts, severity), evidence)


def _decay_lost(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        decay = (tensor.lr or 0.0) * (tensor.weight_decay or 0.0)
        return "warning" if is_lossy(tensor) and 0.0 < decay < _VANISHES else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        largest = max((tensor.lr or 0.0) * (tensor.weight_decay or 0.0) for tensor in tensors)
        return {"lr x decay": f"{largest:.3g} at most, and {_VANISHES:.3g} is the least that can arrive"}

    return breaches(judged(facts, severity), evidence)


_MASTERS = "let the optimizer step float32 masters (recipe bf16_master) or float32 parameters under autocast (fp32_autocast)"

RULES = (
    Rule(
        code="BXP101",
        title="the optimizer steps 16-bit tensors, and nothing keeps what rounding loses",
        severity="error",
        why="bfloat16 keeps 8 significant bits: an update below 2^-9 of its weight is rounded away, however often it comes",
        measured="dtype of every tensor the innermost optimizer updates, read on all ranks inside its step",
        repair=f"{_MASTERS}; {RETUNE}",
        references=("OpenTau#181", "accelerate#3979", "transformers#42805", "AReaL#1292"),
        reads=("stepped",),
        check=_sixteen_bit_steps,
    ),
    Rule(
        code="BXP102",
        title="updates are lost: what arrives in the weights is not what the optimizer meant",
        severity="error",
        why=(
            "a 16-bit weight takes an update only if it reaches half a unit in its last place; the effective descent quality "
            "<u, what arrived> / |u|^2 is 1 when every update arrives and 0 when none does"
        ),
        measured=(
            "each update computed in float32 from the same weight, gradient and state, against what the stored weight moved by "
            "in the steps looked at closely; elements without a gradient do not count"
        ),
        repair=f"{_MASTERS}; {RETUNE}",
        references=("arXiv:2405.03637", "AReaL#1634", "VersatIL#5"),
        reads=("stepped", "numbers"),
        check=_lost_updates,
    ),
    Rule(
        code="BXP103",
        title="a parameter is pinned: it stays bit-identical although its updates are not zero",
        severity="error",
        why=(
            "a norm weight stored as 1.0 in bfloat16 cannot decrease at a learning rate below 0.00195, nor increase "
            "below 0.0039"
        ),
        measured="bits of the stored tensor before the first and after the last step seen, and the updates in between",
        repair=f"{_MASTERS}, at least for this parameter; {RETUNE}",
        references=("OpenTau#181",),
        reads=("stepped", "numbers"),
        check=_pinned,
    ),
    Rule(
        code="BXP104",
        title="the live parameters are not the rounded masters",
        severity="error",
        why="the model then computes with other weights than those that are trained",
        measured="local shards of live parameters against the masters cast to their dtype, after steps",
        repair="copy the masters into the live parameters after every step, and change weights nowhere else",
        references=("OpenTau#186",),
        reads=("stepped", "links"),
        check=_live_differs,
    ),
    Rule(
        code="BXP105",
        title="masters or optimizer state are on another device than the live parameters",
        severity="error",
        why="every step then waits for copies between devices; it happens when masters are made before the model is moved",
        measured="devices of stepped tensors, of their state, and of the live parameters they stand for",
        repair=(
            "make masters after the model is on its device, or declare the offload to the backend that does it asynchronously"
        ),
        references=("OpenTau#186",),
        reads=("stepped", "links"),
        check=_other_device,
    ),
    Rule(
        code="BXP106",
        title="weight decay is lost to rounding",
        severity="warning",
        why="decay multiplies a weight by 1 - lr x weight_decay: below 2^-9 the product is rounded back to the weight",
        measured="learning rate and weight decay of 16-bit tensors that are stepped without compensation",
        repair=f"{_MASTERS}; {RETUNE}",
        references=("OpenTau#181",),
        reads=("stepped", "options"),
        check=_decay_lost,
    ),
)
