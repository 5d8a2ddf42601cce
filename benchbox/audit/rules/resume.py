"""BXP5xx: whether what was saved is what goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.audit.rules.rule import SIXTEEN_BIT, Breach, Rule, breaches, judged, percent, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.measure.witness.facts import RankFacts, SteppedTensor

# Of few elements all may be exact in bfloat16 by chance, or because they never moved.
_FEWEST = 64
_ALL = 1.0


def _has_run(tensor: SteppedTensor) -> bool:
    """Real updates came before the first step seen. After the very first ones, weights still are what they were made of."""
    return (tensor.numbers.steps_before or 0) > 0 and tensor.elements >= _FEWEST


def _rederived(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        is_master = tensor.dtype == "float32" and tensor.live_dtype in SIXTEEN_BIT and not tensor.live
        trained = _has_run(tensor) and _moves(tensor)
        return "error" if is_master and trained and tensor.numbers.bf16_valued.get("weight") == _ALL else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        steps = max(tensor.numbers.steps_before or 0 for tensor in tensors)
        return {"bf16-valued": "100% of the elements, after " + f"{steps} steps that leave next to none"}

    return breaches(judged(facts, severity), evidence)


def _moves(tensor: SteppedTensor) -> bool:
    """Not known to stand still: a weight without updates keeps the values it was made of."""
    return tensor.numbers.steps == 0 or tensor.numbers.updates > 0


def _rounded_moments(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def rounded(tensor: SteppedTensor) -> list[str]:
        shares = tensor.numbers.bf16_valued.items()
        return [name for name, share in shares if name != "weight" and share == _ALL and tensor.state.get(name) == "float32"]

    def severity(tensor: SteppedTensor) -> Severity | None:
        return "warning" if _has_run(tensor) and rounded(tensor) else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        return {"state": shown(name for tensor in tensors for name in rounded(tensor))}

    return breaches(judged(facts, severity), evidence)


def _changed(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    for each in facts:
        for load in each.loads:
            expected = load.before | load.given
            changed = {
                name: (dtypes, load.held.get(name, ("nothing",)))
                for name, dtypes in expected.items()
                if name != "step" and set(load.held.get(name, ())) != set(dtypes)
            }
            if changed:
                told = [f"{name}: {', '.join(was)} became {', '.join(held)}" for name, (was, held) in changed.items()]
                yield Breach("error", load.optimizer, each.rank, {"state": told})
                return


def _stale(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    def severity(tensor: SteppedTensor) -> Severity | None:
        return "error" if (tensor.numbers.live_differs_first or 0.0) > 0.0 else None

    def evidence(tensors: Sequence[SteppedTensor]) -> dict[str, Any]:
        worst = max(tensor.numbers.live_differs_first or 0.0 for tensor in tensors)
        return {"differs": f"{percent(worst)} of the elements looked at, before the first step seen"}

    return breaches(judged(facts, severity), evidence)


RULES = (
    Rule(
        code="BXP501",
        title="masters were derived again from 16-bit weights on resume",
        severity="error",
        why=(
            "what the masters held below bfloat16's precision is gone: small updates of all former steps that had not yet shown"
        ),
        measured=(
            "share of float32 masters that bfloat16 holds exactly, after steps were taken: 0.000 of trained ones, 1.000 "
            "of derived ones"
        ),
        repair="save the masters and restore them bit for bit, before the live weights are made from them",
        references=("OpenTau#185", "Megatron-LM#1359"),
        reads=("stepped", "links"),
        check=_rederived,
    ),
    Rule(
        code="BXP502",
        title="moments are float32 by type and bfloat16 by value",
        severity="warning",
        why="they went through bfloat16 on the way, in a checkpoint or a cast, and were rounded there",
        measured="share of float32 moments that bfloat16 holds exactly, after steps were taken",
        repair="save and load optimizer state in float32, past load_state_dict's cast to the parameter's dtype",
        references=("OpenTau#184", "speculators#899"),
        reads=("stepped",),
        check=_rounded_moments,
    ),
    Rule(
        code="BXP503",
        title="loading changed the dtype of optimizer state, or lost it",
        severity="error",
        why=(
            "torch's load_state_dict casts state to the dtype of the parameter it belongs to, and takes a checkpoint without "
            "state for one of an optimizer that has none: it says nothing of either"
        ),
        measured="names and dtypes of the state given to load_state_dict and held before it, against those held after it",
        repair="step float32 tensors (masters), or restore state under a class that keeps its dtype",
        references=("DeepSpeed#7786",),
        reads=("loads",),
        check=_changed,
    ),
    Rule(
        code="BXP504",
        title="masters are stale: weights were loaded behind their back",
        severity="error",
        why="the first step rounds the old masters into the live weights, and what was loaded is lost",
        measured="local shards of live parameters against the masters cast to their dtype, before the first step seen",
        repair="load weights before masters are made, or refresh the masters after loading",
        references=("DeepSpeed#4141", "prime-rl#3234"),
        reads=("stepped", "links"),
        check=_stale,
    ),
)
