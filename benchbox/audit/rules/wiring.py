"""BXP4xx: connections between schedule, optimizer, model and launcher."""

from __future__ import annotations

from itertools import chain, pairwise
from statistics import median_low
from typing import TYPE_CHECKING

from benchbox.audit.repairs import SCHEDULE_BY_LIBRARY
from benchbox.audit.rules.base import Rule, RuleViolation, abbreviate, names_evidence
from benchbox.observer.stepped_tensors import all_stepped_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.observer.facts import LiveTensor, RankFacts, StepFacts, SteppedTensor

_RATE_TOLERANCE = 1e-6  # relative: rates travel through float32
# Half of the steps that a command is observed for by default.
_UNMOVED_STEPS = 10
_UNMOVED_TITLES: dict[Severity, str] = {
    "error": "no step moves weights that have gradients: the optimizer holds others in their place",
    "info": "weights have gradients, and no optimizer that steps holds them",
}
# Names of a backend in accelerate, and the names that the observer then gives it.
_BACKEND_PREFIXES = {"fsdp": ("fsdp", "hsdp"), "zero": ("zero", "deepspeed")}
# The default weight decay of AdamW: nobody asked for it.
_ADAMW_DECAY = 0.01


def _ineffective_schedule(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        if rank_facts.steps and all(map(_rates_from_schedules, rank_facts.steps)):
            continue  # any other schedules belong to optimizers that were discarded
        for schedule in rank_facts.schedules:
            course = [
                (step.step, step.schedule_rates[schedule.name], step.rates)
                for step in rank_facts.steps
                if schedule.name in step.schedule_rates
            ]
            diverging = [
                (step, scheduled, in_force)
                for step, scheduled, in_force in course
                if not any(_rates_within(rates, scheduled) for rates in in_force.values())
            ]
            varies = len({scheduled for _, scheduled, _ in course}) > 1
            if not diverging or not varies:  # a constant one may advance by epochs, or be left over from an earlier stage
                continue
            if schedule.reaches and diverging[-1] != course[-1]:  # it gets to groups that were added when it advances next
                continue
            step, scheduled, in_force = diverging[-1]
            evidence = {
                "step": step,
                "schedule says": list(scheduled),
                "stepped with": [f"{name}: {', '.join(f'{rate:.4g}' for rate in rates)}" for name, rates in in_force.items()],
                "bound to": schedule.optimizer + (" (another one than steps)" if schedule.reaches is False else ""),
            }
            yield RuleViolation("error", schedule.name, rank_facts.rank, evidence)
            return
    yield from _zero_rates(facts)


def _zero_rates(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Yield a violation if every rate of every observed step is zero, as of a warm-up that never advances."""
    for rank_facts in facts:
        rates = [rate for step in rank_facts.steps for rates in step.rates.values() for rate in rates]
        if len(rank_facts.steps) >= _UNMOVED_STEPS and rates and not any(rates):
            where = ", ".join(sorted({name for step in rank_facts.steps for name in step.rates}))
            evidence = {"steps": len(rank_facts.steps), "schedules": [schedule.name for schedule in rank_facts.schedules]}
            title = "the learning rate is zero in every observed step: nothing is trained"
            yield RuleViolation("error", where, rank_facts.rank, evidence, title)
            return


def _rates_from_schedules(step: StepFacts) -> bool:
    """Return whether every rate in force is one that some schedule set."""
    in_force = list(chain.from_iterable(step.rates.values()))
    return _rates_within(in_force, list(chain.from_iterable(step.schedule_rates.values())))


def _rates_within(in_force: Sequence[float], scheduled: Sequence[float]) -> bool:
    """Return whether all rates in force are among the scheduled ones: an optimizer may step only some of its groups."""
    return all(
        any(abs(rate - expected) <= _RATE_TOLERANCE * max(abs(rate), abs(expected)) for expected in scheduled)
        for rate in in_force
    )


def _no_scheduled_rates(facts: Sequence[RankFacts]) -> str | None:
    observed = any(step.schedule_rates for rank_facts in facts for step in rank_facts.steps)
    return None if observed else "the rates of no schedule were observed"


def _unprepared(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        prepared = rank_facts.prepared
        if prepared is not None and prepared.unknown:
            severity: Severity = "error" if prepared.accumulation > 1 else "warning"
            evidence = {
                "optimizers": list(prepared.unknown),
                "accumulation": prepared.accumulation,
                "prepared": list(prepared.wrapped) or ["none"],
            }
            yield RuleViolation(severity, prepared.unknown[0], rank_facts.rank, evidence)
            return


def _wrong_cadence(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        violations = list(_premature_steps(rank_facts)) or list(_fast_schedules(rank_facts))
        if violations:
            yield from violations
            return


def _premature_steps(facts: RankFacts) -> Iterator[RuleViolation]:
    """Yield a violation if a step had no forward pass before it, or all had fewer than the accumulation asks for. Single steps
    may have fewer: the last accumulation window of an epoch is cut short, which may be every one of a small dataset.
    """
    accumulation = facts.prepared.accumulation if facts.prepared is not None else 0
    counted = [step for step in facts.steps if step.micro_batches is not None]
    micro_batches = [step.micro_batches for step in counted]
    if not any(micro_batches):
        return  # the script calls no module
    most = max((step.micro_batches or 0 for step in counted if not step.ends_epoch), default=accumulation)
    if 0 in micro_batches or most < accumulation:
        where = ", ".join(sorted({name for step in facts.steps for name in step.rates})) or "optimizer"
        evidence = {"micro-batches before each step": micro_batches, "to be accumulated": accumulation or None}
        yield RuleViolation("error", where, facts.rank, evidence, "the optimizer steps more often than once in its window")


def _fast_schedules(facts: RankFacts) -> Iterator[RuleViolation]:
    for schedule in facts.schedules:
        counts = [step.schedule_steps[schedule.name] for step in facts.steps if schedule.name in step.schedule_steps]
        # Of most steps: a scaler skips some, and an epoch's last accumulation window may be short.
        stride = median_low([later - earlier for earlier, later in pairwise(counts)] or [0])
        if stride > 1:
            # accelerate advances schedules once for every process, so that they may be written for a single one
            by_design = facts.prepared is not None and stride == facts.world_size
            evidence = {"advances in a step": stride, "world size": facts.world_size}
            title = f"the schedule advances {stride} times in a step"
            yield RuleViolation("info" if by_design else "error", schedule.name, facts.rank, evidence, title)


def _cadence_unobserved(facts: Sequence[RankFacts]) -> str | None:
    counted = any(step.micro_batches or step.schedule_steps for rank_facts in facts for step in rank_facts.steps)
    return None if counted else "neither forward passes nor advances of a schedule were counted"


def _unlinked(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Yield a violation for trainable parameters that nothing steps, while an optimizer steps or holds tensors that are no
    parameters of the model, or steps nothing at all.
    """
    is_idle = all(_steps_nothing(rank_facts) for rank_facts in facts)
    linked_on_any_rank = {p.name for rank_facts in facts for p in rank_facts.parameters if p.linked}
    for rank_facts in facts:
        orphans = _orphans(rank_facts)
        if orphans and _has_unexplained_updates(rank_facts):
            continue
        trainable = [p for p in rank_facts.parameters if p.trainable and p.elements]
        untrained = [
            p
            for p in trainable
            if (p.linked is False and p.name not in linked_on_any_rank)
            or (is_idle and p.unmoved_steps)  # linked to tensors that have the shapes of masters, and are not stepped
        ]
        # A temperature that is learned beside the model replaces none of its matrices.
        orphans_replace_them = 2 * sum(tensor.elements for tensor in orphans) >= sum(p.elements for p in untrained)
        if untrained and ((orphans and orphans_replace_them) or _steps_nothing(rank_facts) or rank_facts.strangers):
            evidence = {
                "parameters": len(untrained),
                **names_evidence(p.name for p in untrained),
                "stepped": abbreviate(tensor.name for tensor in orphans) or ("nothing" if _steps_nothing(rank_facts) else None),
                "held, without a gradient": abbreviate(rank_facts.strangers) or None,
            }
            yield RuleViolation("error", _describe_chain(rank_facts), rank_facts.rank, evidence)
            return
    yield from _unmoved(facts)
    yield from _untrained_in_checkpoint(facts)


def _describe_chain(facts: RankFacts) -> str:
    return " > ".join(facts.optimizer_chain) or "optimizer"


def _steps_nothing(facts: RankFacts) -> bool:
    return "stepped" not in facts.missing and not facts.stepped and not facts.opaque


def _untrained_in_checkpoint(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Yield a violation for trainable parameters in a checkpoint that no optimizer holds: they are as they were initialised."""
    for rank_facts in facts:
        untrained = [p for p in rank_facts.parameters if p.trainable and p.linked is False]
        if rank_facts.source == "checkpoint" and untrained:
            evidence = {"parameters": len(untrained), **names_evidence(p.name for p in untrained)}
            where = _describe_chain(rank_facts)
            title = "the checkpoint has trainable parameters that no optimizer holds"
            yield RuleViolation("warning", where, rank_facts.rank, evidence, title)
            return


def _unmoved(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Yield a violation for parameters with gradients that no step moves.

    An optimizer that claims them, or steps others of their names and sizes, was meant to move them. Parameters of which no
    optimizer knows may be frozen on purpose.
    """
    linked_on_any_rank = {p.name for rank_facts in facts for p in rank_facts.parameters if p.linked}
    for rank_facts in facts:
        where = _describe_chain(rank_facts)
        parameters = [p for p in rank_facts.parameters if p.trainable and p.elements]
        unmoved = [p for p in parameters if p.gradient is not None and p.unmoved_steps >= _UNMOVED_STEPS]
        stepped_twins = {(p.name, p.elements) for p in parameters if p.linked and not p.unmoved_steps}
        meant = [p for p in unmoved if p.linked or (p.name, p.elements) in stepped_twins]
        unclaimed = [p for p in unmoved if p not in meant and p.linked is False and p.name not in linked_on_any_rank]
        graded: tuple[tuple[Severity, list[LiveTensor]], ...] = (("error", meant), ("info", unclaimed))
        for severity, violating in graded:
            if violating:
                evidence = {
                    "parameters": len(violating),
                    **names_evidence(p.name for p in violating),
                    "steps without a change": max(p.unmoved_steps for p in violating),
                }
                yield RuleViolation(severity, where, rank_facts.rank, evidence, _UNMOVED_TITLES[severity])
                return


def _orphans(facts: RankFacts) -> list[SteppedTensor]:
    """Return the stepped tensors that correspond to no parameter of the model."""
    return [tensor for tensor in facts.stepped if not tensor.live and tensor.live_dtype is None and not tensor.covers]


def _has_unexplained_updates(facts: RankFacts) -> bool:
    """Return whether trainable parameters change without an observed optimizer that steps them."""
    return any(p.trainable and p.linked is None for p in facts.parameters)


def _unknown_links(facts: Sequence[RankFacts]) -> str | None:
    if any(_orphans(rank_facts) and _has_unexplained_updates(rank_facts) for rank_facts in facts):
        return "parameters change, and which of the stepped tensors belong to them could not be determined"
    return None


def _other_backend(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    for rank_facts in facts:
        setup = rank_facts.setup
        if setup is None or setup.requested is None:
            continue
        if not setup.backend.startswith(_BACKEND_PREFIXES.get(setup.requested, (setup.requested,))):
            evidence = {"requested": setup.requested, "by": setup.source, "observed": setup.backend, "model": setup.model_class}
            yield RuleViolation("error", setup.model_class, rank_facts.rank, evidence)
            return


def _decay_by_shape(facts: Sequence[RankFacts]) -> Iterator[RuleViolation]:
    """Judge all ranks together: one rank may hold only parameters that are rightly not decayed."""
    stepped = list(all_stepped_tensors(facts))
    if any(tensor.weight_decay for _, tensor in stepped):
        return
    flattened = [(rank, tensor) for rank, tensor in stepped if (tensor.live_ndim or 0) >= 2 and len(tensor.shape) < 2]
    empty = [decay for rank_facts in facts for decay, tensors in rank_facts.groups if decay and not tensors]
    defaults = [rank_facts.default_decay for rank_facts in facts]
    requested = [decay for decay in defaults if decay and decay != _ADAMW_DECAY]
    if flattened and (empty or requested):
        intended = (
            f"{max(empty)} of a parameter group without parameters" if empty else f"{requested[0]}, the optimizer's default"
        )
        first_tensor = flattened[0][1]
        evidence = {
            "decay meant": intended,
            "decay in force": 0.0,
            **names_evidence(tensor.name for _, tensor in flattened),
            "shapes": f"{first_tensor.live_ndim} dimensions, stepped as {len(first_tensor.shape)}",
            "ranks": sorted({rank for rank, _ in flattened}),
        }
        yield RuleViolation("error", first_tensor.optimizer, min(rank for rank, _ in flattened), evidence)


def _unknown_shapes(facts: Sequence[RankFacts]) -> str | None:
    stepped = [tensor for _, tensor in all_stepped_tensors(facts)]
    observed = any(tensor.weight_decay or tensor.live_ndim is not None for tensor in stepped)
    return "the unsharded shapes of the parameters are not known" if stepped and not observed else None


RULES = (
    Rule(
        code="BXP401",
        title="the learning-rate schedule does not reach the optimizer that steps",
        severity="error",
        rationale=(
            "a schedule writes into the groups of the optimizer it was built on: built on one that is discarded or "
            "replaced, it changes nothing"
        ),
        measurement="rates in force inside the step, compared with the rates of each schedule, step by step",
        repair="build the schedule on the optimizer that steps, after everything is wrapped, and replace neither afterwards",
        repairs=SCHEDULE_BY_LIBRARY,
        locations=("schedule", "optimizer"),
        references=("OpenTau#182", "OpenTau#186"),
        sections=("steps", "schedule"),
        check=_ineffective_schedule,
        missing_evidence=_no_scheduled_rates,
    ),
    Rule(
        code="BXP402",
        title="an optimizer steps that accelerate does not know",
        severity="error",
        conditions="error under gradient accumulation, otherwise warning",
        rationale=(
            "prepare() returns what it does not recognise unchanged: under accumulation it then steps on every micro-batch"
        ),
        measurement="optimizers that step, compared with those that the Accelerator wrapped",
        repair="make the wrapper a subclass of torch.optim.Optimizer and hand it to prepare",
        locations=("optimizer",),
        references=("OpenTau#182",),
        sections=("prepared", "stepped"),
        check=_unprepared,
    ),
    Rule(
        code="BXP403",
        title="the schedule or the optimizer has the wrong cadence",
        severity="error",
        conditions="error; info where accelerate advances a schedule once for every process",
        rationale=(
            "a schedule that advances with every micro-batch, or once for every process, ends its decay that many times too "
            "early"
        ),
        measurement="forward passes, optimizer steps and advances of schedules between one step and the next",
        repair=(
            "step the schedule once for each optimizer step; with accelerate, let it be prepared with "
            "step_scheduler_with_optimizer"
        ),
        locations=("schedule", "optimizer"),
        references=("OpenTau#186",),
        sections=("steps",),
        check=_wrong_cadence,
        missing_evidence=_cadence_unobserved,
    ),
    Rule(
        code="BXP404",
        title="the optimizer holds tensors that are not the model's",
        severity="error",
        conditions=(
            "error; of weights that no optimizer knows of warning in a checkpoint that tells them from frozen ones "
            "(DeepSpeed), and info in training, where a part may be left out on purpose"
        ),
        rationale=(
            "wrapping, moving, casting or a new head replaces parameters: an optimizer built before keeps the old ones, and "
            "the new ones are never trained"
        ),
        measurement=(
            "identity and storage of the tensors in the optimizer, compared with the model's parameters; masters by the "
            "parameters they are copied into; weights with gradients that stay the same over ten steps"
        ),
        repair="build the optimizer when the model is complete, wrapped, moved and cast",
        locations=("optimizer",),
        references=("pytorch#107843",),
        sections=("stepped", "links", "parameters"),
        check=_unlinked,
        missing_evidence=_unknown_links,
    ),
    Rule(
        code="BXP405",
        title="another backend runs than was requested",
        severity="error",
        rationale="accelerate silently drops plugins that it cannot use, as under cpu=True, and runs plain DDP",
        measurement="classes and strategies of the live wrappers, compared with the request to accelerate",
        repair="remove the setting that makes accelerate drop the plugin; until then do not compare results by backend",
        references=("accelerate state.py",),
        sections=("setup",),
        check=_other_backend,
    ),
    Rule(
        code="BXP406",
        title="weight decay is zero because groups were built after sharding",
        severity="error",
        rationale=(
            "sharding makes every parameter one-dimensional: code that decays only two-dimensional parameters decays nothing"
        ),
        measurement=(
            "weight decay of all stepped tensors, their shapes as stepped and unsharded, and groups that were meant to decay"
        ),
        repair="choose the decayed parameters by name and shape before the model is wrapped (benchbox.optim.plan_groups)",
        locations=("optimizer",),
        references=("VITRA fsdp.py",),
        sections=("stepped", "options"),
        check=_decay_by_shape,
        missing_evidence=_unknown_shapes,
    ),
)
