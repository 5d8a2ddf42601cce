"""BXP4xx: whether schedule, optimizer, model and launcher are connected as they seem."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from benchbox.audit.rules.rule import Breach, Rule, shown
from benchbox.measure.witness.facts import all_stepped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity
    from benchbox.measure.witness.facts import RankFacts

_SAME_RATE = 1e-6  # relative: rates travel through float32
_ACCELERATED = "AcceleratedScheduler"


def _unreached(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    for each in facts:
        for schedule in each.schedules:
            course = [
                (s.step, s.schedule_rates[schedule.name], s.rates) for s in each.steps if schedule.name in s.schedule_rates
            ]
            if all(_agree(mine, rates) for _, mine, rates in course):
                continue
            moved = len({mine for _, mine, _ in course}) > 1
            if schedule.reaches and not moved:
                continue
            step, mine, rates = next(entry for entry in reversed(course) if not _agree(entry[1], entry[2]))
            evidence = {
                "step": step,
                "schedule says": list(mine),
                "stepped with": [f"{name}: {', '.join(f'{rate:.4g}' for rate in found)}" for name, found in rates.items()],
                "bound to": schedule.optimizer,
            }
            yield Breach("error", schedule.name, each.rank, evidence)
            return


def _agree(mine: Sequence[float], rates: dict[str, tuple[float, ...]]) -> bool:
    """Whether some optimizer stepped with rates that the schedule gave (it may step only some of its groups)."""
    return any(
        all(any(abs(rate - own) <= _SAME_RATE * max(abs(rate), abs(own)) for own in mine) for rate in found)
        for found in rates.values()
    )


def _unprepared(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    for each in facts:
        if each.prepared is not None and each.prepared.unknown:
            severity: Severity = "error" if each.prepared.accumulation > 1 else "warning"
            evidence = {
                "optimizers": list(each.prepared.unknown),
                "accumulation": each.prepared.accumulation,
                "prepared": list(each.prepared.wrapped) or ["none"],
            }
            yield Breach(severity, each.prepared.unknown[0], each.rank, evidence)
            return


def _wrong_cadence(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    for each in facts:
        wanted = each.prepared.accumulation if each.prepared is not None else None
        micro = [(step.step, step.micro_batches) for step in each.steps if step.micro_batches is not None]
        wrong = [(step, seen) for step, seen in micro if seen == 0 or (wanted is not None and seen < wanted)]
        if wrong:
            evidence = {"step": wrong[0][0], "micro-batches": wrong[0][1], "accumulation": wanted}
            yield Breach("error", "optimizer", each.rank, evidence, "the optimizer steps more often than once in its window")
            return
        yield from _fast_schedules(each)
        if any(_fast_schedules(each)):
            return


def _fast_schedules(facts: RankFacts) -> Iterator[Breach]:
    for schedule in facts.schedules:
        counts = [step.schedule_steps[schedule.name] for step in facts.steps if schedule.name in step.schedule_steps]
        strides = {later - earlier for earlier, later in pairwise(counts)}
        if len(strides) == 1 and (stride := strides.pop()) > 1:
            # accelerate advances schedules once for every process, so that they may be written for a single one
            by_design = facts.prepared is not None and stride == facts.world_size
            evidence = {"advances in a step": stride, "world size": facts.world_size}
            title = f"the schedule advances {stride} times in a step"
            yield Breach("info" if by_design else "error", schedule.name, facts.rank, evidence, title)


def _unlinked(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    """Trainable parameters that nothing steps, beside stepped tensors (or an optimizer) that stand for no parameter."""
    linked_somewhere = {p.name for each in facts for p in each.parameters if p.linked}
    for each in facts:
        orphans = [tensor.name for tensor in each.stepped if not tensor.live and tensor.live_dtype is None]
        lost = [
            p.name for p in each.parameters if p.trainable and p.elements and not p.linked and p.name not in linked_somewhere
        ]
        idle = not each.stepped and not each.opaque
        if lost and (orphans or idle):
            evidence = {
                "parameters": shown(lost),
                "stepped": shown(orphans) if orphans else "the optimizer holds no tensor that has a gradient",
            }
            yield Breach("error", " > ".join(each.optimizer_chain) or "optimizer", each.rank, evidence)
            return


def _other_backend(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    for each in facts:
        setup = each.setup
        if setup is not None and setup.requested is not None and not setup.backend.startswith(setup.requested):
            evidence = {"requested": setup.requested, "by": setup.source, "observed": setup.backend, "model": setup.model_class}
            yield Breach("error", setup.model_class, each.rank, evidence)
            return


def _decay_by_shape(facts: Sequence[RankFacts]) -> Iterator[Breach]:
    """Judged over all ranks: one rank may hold only parameters that are rightly not decayed."""
    stepped = [tensor for _, tensor in all_stepped(facts)]
    matrices = [tensor for tensor in stepped if (tensor.live_ndim or len(tensor.shape)) >= 2]
    if not matrices or any(tensor.weight_decay for tensor in stepped):
        return
    flattened = [tensor for tensor in matrices if len(tensor.shape) < 2]
    empty = [decay for each in facts for decay, tensors in each.groups if decay and not tensors]
    defaults = [each.default_decay for each in facts if each.default_decay]
    if flattened and (empty or defaults):
        meant = f"{max(empty)} of a parameter group without parameters" if empty else f"{defaults[0]}, the optimizer's default"
        evidence = {
            "decay meant": meant,
            "decay in force": 0.0,
            "names": shown(tensor.name for tensor in flattened),
            "shapes": shown(f"{tensor.live_ndim}-D, stepped as {len(tensor.shape)}-D" for tensor in flattened),
        }
        yield Breach("error", flattened[0].optimizer, facts[0].rank, evidence)


RULES = (
    Rule(
        code="BXP401",
        title="the learning-rate schedule does not reach the optimizer that steps",
        severity="error",
        why=(
            "a schedule writes into the groups of the optimizer it was built on: built on one that is discarded or "
            "replaced, it changes nothing"
        ),
        measured="rates in force inside the step against the rates each schedule gives, step by step",
        repair="build the schedule on the optimizer that steps, after everything is wrapped, and rebind neither",
        references=("OpenTau#182", "OpenTau#186"),
        reads=("steps", "schedule"),
        check=_unreached,
    ),
    Rule(
        code="BXP402",
        title="an optimizer steps that accelerate does not know",
        severity="error",
        why="what prepare does not recognise is passed through: under accumulation it then steps on every micro-batch",
        measured="optimizers that step against those that the Accelerator wrapped",
        repair="make the wrapper a subclass of torch.optim.Optimizer and hand it to prepare",
        references=("OpenTau#182",),
        reads=("prepared", "stepped"),
        check=_unprepared,
    ),
    Rule(
        code="BXP403",
        title="the schedule or the optimizer has the wrong cadence",
        severity="error",
        why="a schedule that advances once a micro-batch or once a process ends its decay that many times too early",
        measured="forward passes, optimizer steps and advances of schedules between one step and the next",
        repair=(
            "step the schedule once for each optimizer step; with accelerate, let it be prepared with "
            "step_scheduler_with_optimizer"
        ),
        references=("OpenTau#186",),
        reads=("steps",),
        check=_wrong_cadence,
    ),
    Rule(
        code="BXP404",
        title="the optimizer steps tensors that are not the model's",
        severity="error",
        why="wrapping, moving or casting may replace parameters: an optimizer built before goes on stepping the old ones",
        measured=(
            "identity and storage of stepped tensors against the model's parameters, and masters by what they are copied into"
        ),
        repair="build the optimizer after the model is wrapped, moved and cast",
        references=("pytorch#107843",),
        reads=("parameters",),
        check=_unlinked,
    ),
    Rule(
        code="BXP405",
        title="another backend runs than was requested",
        severity="error",
        why="accelerate drops its plugins without a word where it finds no use for them, as under cpu=True, and runs plain DDP",
        measured="classes and strategies of the live wrappers against what accelerate was told",
        repair="remove what makes accelerate drop the plugin; compare nothing until the backend is the one that is named",
        references=("accelerate#2624",),
        reads=("setup",),
        check=_other_backend,
    ),
    Rule(
        code="BXP406",
        title="weight decay is zero because groups were built after sharding",
        severity="error",
        why="sharding makes every parameter one-dimensional: a rule that decays what has two dimensions then decays nothing",
        measured=(
            "weight decay of all stepped tensors, their shapes as stepped and unsharded, and groups that were meant to decay"
        ),
        repair="decide decay from names and shapes before the model is wrapped (benchbox.optim.plan_groups)",
        references=("VITRA fsdp.py",),
        reads=("stepped", "options"),
        check=_decay_by_shape,
    ),
)
