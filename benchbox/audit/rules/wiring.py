"""BXP4xx: whether schedule, optimizer, model and launcher are connected as they seem."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING

from benchbox.audit.rules.base import RuleViolation, Rule, names_evidence, abbreviate
from benchbox.observer.facts import all_stepped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import RankFacts, StepFacts, SteppedTensor

_SAME_RATE = 1e-6  # relative: rates travel through float32
# What accelerate calls a backend, and what the witness may then find.
_FAMILIES = {"fsdp": ("fsdp", "hsdp"), "zero": ("zero", "deepspeed")}
# AdamW's own: a weight decay that nobody asked for.
_STOCK_DECAY = 0.01


def _unreached(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        if each.steps and all(map(_all_given, each.steps)):
            continue  # what other schedules there are, are left over from optimizers that were thrown away
        for schedule in each.schedules:
            course = [
                (s.step, s.schedule_rates[schedule.name], s.rates) for s in each.steps if schedule.name in s.schedule_rates
            ]
            astray = [entry for entry in course if not any(_within(found, entry[1]) for found in entry[2].values())]
            moved = len({mine for _, mine, _ in course}) > 1
            if not astray or not moved:  # one that stands still may be of epochs, or left over from an earlier stage
                continue
            step, mine, rates = astray[-1]
            evidence = {
                "step": step,
                "schedule says": list(mine),
                "stepped with": [f"{name}: {', '.join(f'{rate:.4g}' for rate in found)}" for name, found in rates.items()],
                "bound to": schedule.optimizer + (" (another one than steps)" if schedule.reaches is False else ""),
            }
            yield RuleViolation("error", schedule.name, each.rank, evidence)
            return


def _all_given(step: StepFacts) -> bool:
    """Whether every rate in force is one that some schedule gave."""
    return _within(list(chain.from_iterable(step.rates.values())), list(chain.from_iterable(step.schedule_rates.values())))


def _within(found: Sequence[float], given: Sequence[float]) -> bool:
    """Whether all rates found are among those given: an optimizer may step only some of its groups."""
    return all(any(abs(rate - own) <= _SAME_RATE * max(abs(rate), abs(own)) for own in given) for rate in found)


def _no_rates(facts: Sequence[RankFacts]) -> str | None:
    said = any(step.schedule_rates for each in facts for step in each.steps)
    return None if said else "no schedule said which rates it gives"


def _unprepared(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        if each.prepared is not None and each.prepared.unknown:
            severity: Severity = "error" if each.prepared.accumulation > 1 else "warning"
            evidence = {
                "optimizers": list(each.prepared.unknown),
                "accumulation": each.prepared.accumulation,
                "prepared": list(each.prepared.wrapped) or ["none"],
            }
            yield RuleViolation(severity, each.prepared.unknown[0], each.rank, evidence)
            return


def _wrong_cadence(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        found = list(_fast_optimizer(each)) or list(_fast_schedules(each))
        if found:
            yield from found
            return


def _fast_optimizer(facts: RankFacts) -> Iterator[RuleViolation]:
    """Steps without a forward pass before them, or all with fewer than are to be accumulated: the last of an epoch may have."""
    wanted = facts.prepared.accumulation if facts.prepared is not None else None
    seen = [step.micro_batches for step in facts.steps if step.micro_batches is not None]
    if not any(seen):
        return  # the script calls no module
    if 0 in seen or (wanted is not None and max(seen) < wanted):
        where = ", ".join(sorted({name for step in facts.steps for name in step.rates})) or "optimizer"
        evidence = {"micro-batches before each step": seen, "to be accumulated": wanted}
        yield RuleViolation("error", where, facts.rank, evidence, "the optimizer steps more often than once in its window")


def _fast_schedules(facts: RankFacts) -> Iterator[RuleViolation]:
    for schedule in facts.schedules:
        counts = [step.schedule_steps[schedule.name] for step in facts.steps if schedule.name in step.schedule_steps]
        stride = min((later - earlier for earlier, later in pairwise(counts)), default=0)
        if stride > 1:
            # accelerate advances schedules once for every process, so that they may be written for a single one
            by_design = facts.prepared is not None and stride == facts.world_size
            evidence = {"advances in a step": stride, "world size": facts.world_size}
            title = f"the schedule advances {stride} times in a step"
            yield RuleViolation("info" if by_design else "error", schedule.name, facts.rank, evidence, title)


def _no_cadence(facts: Sequence[RankFacts]) -> str | None:
    counted = any(step.micro_batches or step.schedule_steps for each in facts for step in each.steps)
    return None if counted else "neither forward passes nor advances of a schedule were counted"


def _unlinked(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Trainable parameters that nothing steps, beside tensors that an optimizer steps or holds and that are no parameters."""
    linked_somewhere = {p.name for each in facts for p in each.parameters if p.linked}
    for each in facts:
        orphans = _orphans(each)
        if orphans and _moves_unseen(each):
            continue
        unstepped = [p for p in each.parameters if p.trainable and p.elements and p.linked is False]
        lost = [p for p in unstepped if p.name not in linked_somewhere]
        # A temperature that is learned beside the model takes the place of none of its matrices.
        in_their_place = 2 * sum(tensor.elements for tensor in orphans) >= sum(p.elements for p in lost)
        idle = "stepped" not in each.missing and not each.stepped and not each.opaque
        if lost and ((orphans and in_their_place) or idle or each.strangers):
            evidence = {
                "parameters": len(lost),
                **names_evidence(p.name for p in lost),
                "stepped": abbreviate(tensor.name for tensor in orphans) or ("nothing" if idle else None),
                "held, without a gradient": abbreviate(each.strangers) or None,
            }
            yield RuleViolation("error", " > ".join(each.optimizer_chain) or "optimizer", each.rank, evidence)
            return


def _orphans(facts: RankFacts) -> list[SteppedTensor]:
    """Tensors that are stepped and stand for no parameter of the model."""
    return [tensor for tensor in facts.stepped if not tensor.live and tensor.live_dtype is None and not tensor.covers]


def _moves_unseen(facts: RankFacts) -> bool:
    return any(p.trainable and p.linked is None for p in facts.parameters)


def _unknown_links(facts: Sequence[RankFacts]) -> str | None:
    if any(_orphans(each) and _moves_unseen(each) for each in facts):
        return "parameters move, and which of the tensors that are stepped stand for them could not be told"
    return None


def _other_backend(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for each in facts:
        setup = each.setup
        if setup is None or setup.requested is None:
            continue
        if not setup.backend.startswith(_FAMILIES.get(setup.requested, (setup.requested,))):
            evidence = {"requested": setup.requested, "by": setup.source, "observed": setup.backend, "model": setup.model_class}
            yield RuleViolation("error", setup.model_class, each.rank, evidence)
            return


def _decay_by_shape(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Judged over all ranks: one rank may hold only parameters that are rightly not decayed."""
    stepped = list(all_stepped(facts))
    if any(tensor.weight_decay for _, tensor in stepped):
        return
    flattened = [(rank, tensor) for rank, tensor in stepped if (tensor.live_ndim or 0) >= 2 and len(tensor.shape) < 2]
    empty = [decay for each in facts for decay, tensors in each.groups if decay and not tensors]
    asked = [each.default_decay for each in facts if each.default_decay and each.default_decay != _STOCK_DECAY]
    if flattened and (empty or asked):
        meant = f"{max(empty)} of a parameter group without parameters" if empty else f"{asked[0]}, the optimizer's default"
        first = flattened[0][1]
        evidence = {
            "decay meant": meant,
            "decay in force": 0.0,
            **names_evidence(tensor.name for _, tensor in flattened),
            "shapes": f"{first.live_ndim} dimensions, stepped as {len(first.shape)}",
            "ranks": sorted({rank for rank, _ in flattened}),
        }
        yield RuleViolation("error", first.optimizer, min(rank for rank, _ in flattened), evidence)


def _unknown_shapes(facts: Sequence[RankFacts]) -> str | None:
    stepped = [tensor for _, tensor in all_stepped(facts)]
    told = any(tensor.weight_decay or tensor.live_ndim is not None for tensor in stepped)
    return "the unsharded shapes of the parameters are not known" if stepped and not told else None


RULES = (
    Rule(
        code="BXP401",
        title="the learning-rate schedule does not reach the optimizer that steps",
        severity="error",
        rationale=(
            "a schedule writes into the groups of the optimizer it was built on: built on one that is discarded or "
            "replaced, it changes nothing"
        ),
        measurement="rates in force inside the step against the rates each schedule gives, step by step",
        repair="build the schedule on the optimizer that steps, after everything is wrapped, and rebind neither",
        references=("OpenTau#182", "OpenTau#186"),
        sections=("steps", "schedule"),
        check=_unreached,
        missing_evidence=_no_rates,
    ),
    Rule(
        code="BXP402",
        title="an optimizer steps that accelerate does not know",
        severity="error",
        rationale="what prepare does not recognise is passed through: under accumulation it then steps on every micro-batch",
        measurement="optimizers that step against those that the Accelerator wrapped",
        repair="make the wrapper a subclass of torch.optim.Optimizer and hand it to prepare",
        references=("OpenTau#182",),
        sections=("prepared", "stepped"),
        check=_unprepared,
    ),
    Rule(
        code="BXP403",
        title="the schedule or the optimizer has the wrong cadence",
        severity="error",
        rationale="a schedule that advances once a micro-batch or once a process ends its decay that many times too early",
        measurement="forward passes, optimizer steps and advances of schedules between one step and the next",
        repair=(
            "step the schedule once for each optimizer step; with accelerate, let it be prepared with "
            "step_scheduler_with_optimizer"
        ),
        references=("OpenTau#186",),
        sections=("steps",),
        check=_wrong_cadence,
        missing_evidence=_no_cadence,
    ),
    Rule(
        code="BXP404",
        title="the optimizer holds tensors that are not the model's",
        severity="error",
        rationale=(
            "wrapping, moving, casting or a new head replaces parameters: an optimizer built before keeps the old ones, and "
            "the new ones are never trained"
        ),
        measurement=(
            "identity and storage of what the optimizer steps and holds against the model's parameters, and masters by what "
            "they are copied into"
        ),
        repair="build the optimizer when the model is complete, wrapped, moved and cast",
        references=("pytorch#107843",),
        sections=("stepped", "links", "parameters"),
        check=_unlinked,
        missing_evidence=_unknown_links,
    ),
    Rule(
        code="BXP405",
        title="another backend runs than was requested",
        severity="error",
        rationale="accelerate drops its plugins without a word where it finds no use for them, as under cpu=True, and runs plain DDP",
        measurement="classes and strategies of the live wrappers against what accelerate was told",
        repair="remove what makes accelerate drop the plugin; compare nothing until the backend is the one that is named",
        references=("accelerate state.py",),
        sections=("setup",),
        check=_other_backend,
    ),
    Rule(
        code="BXP406",
        title="weight decay is zero because groups were built after sharding",
        severity="error",
        rationale="sharding makes every parameter one-dimensional: a rule that decays what has two dimensions then decays nothing",
        measurement=(
            "weight decay of all stepped tensors, their shapes as stepped and unsharded, and groups that were meant to decay"
        ),
        repair="decide decay from names and shapes before the model is wrapped (benchbox.optim.plan_groups)",
        references=("VITRA fsdp.py",),
        sections=("stepped", "options"),
        check=_decay_by_shape,
        missing_evidence=_unknown_shapes,
    ),
)
