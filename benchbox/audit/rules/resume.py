"""BXP5xx: equality of the saved and the resumed training state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.rules.base import (
    MIN_ELEMENTS,
    Rule,
    RuleViolation,
    abbreviate,
    masters_uncompared,
    moments_rounded_between_steps,
    rms_update,
    seen_between_steps,
    share_violations,
    tensor_violations,
)
from benchbox.observer.facts import MIN_STEPS_BEFORE_LATER
from benchbox.observer.stepped_tensors import all_stepped_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import RankFacts, SteppedTensor

# The first step of a warm-up may have a rate of zero, and leave weights at their initial values.
_MIN_STEPS_BEFORE = 2
# Root mean square of updates that change any float32 weight up to 4: early in a warm-up none may.
_EFFECTIVE_UPDATE = 2.0**-22
_ALL = 1.0
# Each value of the first dtype is one of the second.
_WIDENINGS = frozenset({("bfloat16", "float32"), ("float16", "float32")}) | {
    (narrow, "float64") for narrow in ("bfloat16", "float16", "float32")
}


def _was_updated(tensor: SteppedTensor) -> bool:
    """Return whether real updates came before the first observed step, so that weights no longer have their initial values."""
    enough = (tensor.numbers.steps_before or 0) >= _MIN_STEPS_BEFORE and tensor.elements >= MIN_ELEMENTS
    update = rms_update(tensor.numbers)
    return enough and tensor.lr != 0.0 and (update is None or update >= _EFFECTIVE_UPDATE)


def _nothing_resumed(facts: Sequence[RankFacts]) -> str | None:
    if not any(_was_updated(tensor) for _, tensor in all_stepped_tensors(facts)):
        return (
            f"nothing was resumed: no tensor of {MIN_ELEMENTS} elements or more had {_MIN_STEPS_BEFORE} effective steps "
            "before the first observed one"
        )
    return None


def _moments_unseen(facts: Sequence[RankFacts]) -> str | None:
    if any(seen_between_steps(tensor) for _, tensor in all_stepped_tensors(facts)):
        return None
    reason = _nothing_resumed(facts)
    return reason and f"{reason}; nor were moments compared after {MIN_STEPS_BEFORE_LATER} steps"


def _rederived(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Judge masters, and float32 weights that are stepped themselves: both may be rounded to bfloat16 when they are saved."""

    def severity(tensor: SteppedTensor) -> Severity | None:
        exact = tensor.dtype == "float32" and tensor.numbers.bf16_valued.get("weight") == _ALL
        return "error" if exact and _was_updated(tensor) else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "share that bfloat16 holds exactly": _ALL,
            "steps before": max(tensor.numbers.steps_before or 0 for tensor in tensors),
        }

    return tensor_violations(facts, severity, evidence)


def _rounded_moments(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    yield from _moments_rounded_on_resume(facts)
    for violation in tensor_violations(
        facts,
        lambda tensor: "warning" if moments_rounded_between_steps(tensor) else None,
        lambda tensors: {
            "state": abbreviate(name for tensor in tensors for name in moments_rounded_between_steps(tensor)),
            "share that bfloat16 holds exactly": _ALL,
            "steps before they were compared": max(tensor.numbers.steps_before_later or 0 for tensor in tensors),
        },
    ):
        title = "moments are float32 by type, and rounded to bfloat16 after every step"
        yield violation._replace(title=title, repair="write moments back in float32, without a cast to bfloat16 between steps")


def _moments_rounded_on_resume(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    def bf16_valued_moments(tensor: SteppedTensor) -> list[str]:
        shares = tensor.numbers.bf16_valued.items()
        names = [name for name, share in shares if share == _ALL and tensor.state.get(name) == "float32"]
        # Without momentum the first moment is the gradient, which may have been computed in bfloat16.
        return [name for name in names if name != "exp_avg" or tensor.betas is None or tensor.betas[0] > 0.0]

    def severity(tensor: SteppedTensor) -> Severity | None:
        if moments_rounded_between_steps(tensor):
            return None
        return "warning" if _was_updated(tensor) and bf16_valued_moments(tensor) else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {
            "state": abbreviate(name for tensor in tensors for name in bf16_valued_moments(tensor)),
            "share that bfloat16 holds exactly": _ALL,
            "steps before": max(tensor.numbers.steps_before or 0 for tensor in tensors),
        }

    return tensor_violations(facts, severity, evidence)


def _changed_on_load(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    ranks_by_change: dict[tuple[str, bool, tuple[str, ...]], list[int]] = {}
    for rank_facts in facts:
        for load in rank_facts.loads:
            changes: dict[bool, list[str]] = {False: [], True: []}  # by whether nothing is lost
            for name, dtypes in (load.before | load.given).items():
                held = load.held.get(name, ())
                if name != "step" and set(held) != set(dtypes):
                    text = f"{name}: {', '.join(dtypes)} became {', '.join(held) or 'nothing'}"
                    changes[_is_widened(dtypes, held)].append(text)
            for is_lossless, texts in changes.items():
                if texts:
                    ranks_by_change.setdefault((load.optimizer, is_lossless, tuple(texts)), []).append(rank_facts.rank)
    for (optimizer, is_lossless, state), ranks in ranks_by_change.items():
        evidence = {"state": list(state), "ranks": sorted(set(ranks))}
        if is_lossless:
            title = "loading widened the dtype of optimizer state: nothing of it is lost"
            repair = "nothing, if the state is meant to be stored so from now on"
            yield RuleViolation("info", optimizer, min(ranks), evidence, title, repair)
        else:
            yield RuleViolation("error", optimizer, min(ranks), evidence)


def _is_widened(given: Sequence[str], held: Sequence[str]) -> bool:
    """Return whether state is held in one dtype that has every value of the other dtypes that it was given in."""
    return len(held) == 1 and all(dtype == held[0] or (dtype, held[0]) in _WIDENINGS for dtype in given)


def _nothing_loaded(facts: Sequence[RankFacts]) -> str | None:
    return None if any(rank_facts.loads for rank_facts in facts) else "no optimizer state was loaded"


def _stale_masters(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    label = "share of elements that differ before the first step"
    return share_violations(facts, lambda tensor: tensor.numbers.live_differs_first, label)


RULES = (
    Rule(
        code="BXP501",
        title="masters were derived again from 16-bit weights on resume",
        severity="error",
        rationale=(
            "their bits below bfloat16's precision are gone: the sum of small updates that was not yet visible in the live "
            "weights"
        ),
        measurement=(
            "share of float32 masters or weights that bfloat16 holds exactly, before the first observed step of a resumed run: "
            "0.000 of trained ones, 1.000 of derived ones; elements that never had a gradient do not count"
        ),
        repair="save float32 masters and restore them bit for bit, then make the live weights from them",
        references=("OpenTau#185", "Megatron-LM#1359"),
        sections=("stepped",),
        check=_rederived,
        missing_evidence=_nothing_resumed,
    ),
    Rule(
        code="BXP502",
        title="moments are float32 by type and bfloat16 by value",
        severity="warning",
        rationale="they were rounded to bfloat16 in a checkpoint or a cast",
        measurement=(
            "share of float32 moments that bfloat16 holds exactly, before the first observed step of a resumed run, and before "
            "a later one of any run"
        ),
        repair="save and load optimizer state in float32, and avoid the cast of load_state_dict to the parameter's dtype",
        references=("OpenTau#184", "speculators#899"),
        sections=("stepped",),
        check=_rounded_moments,
        missing_evidence=_moments_unseen,
    ),
    Rule(
        code="BXP503",
        title="loading changed the dtype of optimizer state, or lost it",
        severity="error",
        conditions="error; info where each value of the old dtype is one of the new, as of bfloat16 in float32",
        rationale=(
            "torch's load_state_dict silently casts state to the dtype of its parameter, and silently accepts a checkpoint "
            "without state"
        ),
        measurement=(
            "names and dtypes of the state passed to load_state_dict and present before it, compared with those after it"
        ),
        repair="step float32 tensors (masters), or restore state under a class that keeps its dtype",
        references=("DeepSpeed#7786",),
        sections=("loads",),
        check=_changed_on_load,
        missing_evidence=_nothing_loaded,
    ),
    Rule(
        code="BXP504",
        title="masters are stale: weights were loaded behind their back",
        severity="error",
        rationale="the first step rounds the old masters into the live weights, and the loaded weights are lost",
        measurement=(
            "local shards of live parameters, compared with the masters cast to their dtype, before the first observed step"
        ),
        repair="load weights before masters are made, or refresh the masters after loading",
        references=("DeepSpeed#4141", "prime-rl#3234"),
        sections=("stepped", "links"),
        check=_stale_masters,
        missing_evidence=lambda facts: masters_uncompared(facts, lambda numbers: numbers.live_differs_first),
    ),
)
