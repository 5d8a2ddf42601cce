"""Training files: one cell, the number of its steps, its validation and its checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.attention import default_attention
from benchbox.registry.backends import backend_info
from benchbox.registry.refusals import fields_refusal
from benchbox.registry.trackers import INSTALL, TRACKERS
from benchbox.spec.audit_section import AuditSection
from benchbox.spec.cell import Cell
from benchbox.spec.checks import REQUIRED, check_policies
from benchbox.spec.data_checks import check_data
from benchbox.spec.files import TRAINING_FILES, find_file
from benchbox.spec.load import data_spec
from benchbox.spec.measured_setup import add_measured_values, incomplete_data
from benchbox.spec.optim_file import optim_spec
from benchbox.spec.overrides import apply_overrides
from benchbox.spec.policies import resolve_policies
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.schema import NamedFile
from benchbox.spec.source import Source, read_source
from benchbox.spec.training_keys import refuse_matrix
from benchbox.spec.types import Count, Strict, check_name, refusal
from benchbox.spec.validation_section import ValidationSection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.spec.measured_setup import MeasuredSetup


class BestSection(Strict):
    """Checkpoints that are kept because validation scored them best, beside the newest ones."""

    metric: str = "loss"
    """`loss` of the validation, or the name of one of its terms or parts."""
    mode: Literal["min", "max"] = "min"
    """Whether the lowest values are the best, as of a loss, or the highest, as of an accuracy."""
    count: Count = 1
    """Number of best checkpoints to keep."""


class CheckpointSection(Strict):
    """Checkpoints: how often, how many are kept, and what is in them."""

    every: Annotated[int, Field(ge=0)] = 1000
    """Steps between checkpoints; 0 for none, not even at the end."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: BestSection | None = None
    """Also keep the checkpoints that validation scored best; needs `validation`."""
    background: bool = True
    """Write a copy in host memory while the training goes on; false waits until the files are on disk."""
    trainable_only: bool = False
    """Leave frozen weights out: a resumed training takes them from `weights` or the seed again."""


def _check_tracker(name: str) -> str:
    check_name("tracker", name, TRACKERS)
    if not TRACKERS[name].is_installed:
        raise refusal(f"tracker {name} is not installed", INSTALL)
    return name


TrackerName = Annotated[str, AfterValidator(_check_tracker), WithJsonSchema({"enum": list(TRACKERS)})]

# The mappings of a training file by their key. Each is a field of the file and of `TrainConfig`.
SECTIONS: dict[str, type[Strict]] = {
    "audit": AuditSection,
    "checkpoint": CheckpointSection,
    "validation": ValidationSection,
}


class TrainFile(NamedFile):
    """A policy to train, and the set-up to train it with."""

    steps: Count
    """Optimizer steps in all."""
    log_every: Count = 10
    """Steps between lines on the screen; every step is in `metrics.jsonl`."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What survives an interruption."""
    validation: ValidationSection = ValidationSection()
    """The loss of episodes that are not trained on."""
    audit: AuditSection = AuditSection()
    """Audits of the precision while the training runs."""
    trackers: list[TrackerName] = Field(default=[])
    """Where metrics go besides `metrics.jsonl`."""
    hang_after_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress of any rank after which the training is called hung and ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run, resolved. `cell` is the one that a benchmark of the same set-up would measure."""

    name: str
    cell: Cell
    steps: int
    log_every: int
    checkpoint: CheckpointSection
    validation: ValidationSection
    audit: AuditSection
    trackers: tuple[str, ...] = ()
    hang_after_s: float
    policy_dirs: tuple[Path, ...] = field(default=(), compare=False)  # those in the file included; not stored

    def to_dict(self) -> dict[str, Any]:
        values = {declared.name: getattr(self, declared.name) for declared in fields(self) if declared.name != "policy_dirs"}
        sections = {name: values[name].model_dump(mode="json") for name in SECTIONS}
        return {**values, **sections, "cell": self.cell.to_dict(), "trackers": list(self.trackers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of `to_dict`; a section that an older benchbox did not write has its defaults."""
        sections = {name: section.model_validate(values.get(name, {}), strict=False) for name, section in SECTIONS.items()}
        trackers = tuple(values.get("trackers", ()))
        return cls(**{**values, **sections, "cell": Cell.from_dict(values["cell"]), "trackers": trackers})


def load_train(
    path: str | Path | None,
    overrides: Mapping[str, str] | None = None,
    policy_dirs: Sequence[Path] = (),
    *,
    measured: MeasuredSetup | None = None,
) -> TrainConfig:
    """Read and check a training file, by path or by name (see `find_file`); `overrides` as for `load_matrix`.

    Args:
        path: None, with a measured set-up, for a training whose other values are overrides and defaults.
        measured: the set-up to train with. The file then need not have one, see `add_measured_values`.

    Raises:
        ConfigurationError: with every problem of the file, top to bottom, each at its line and column.
    """
    if path is None:
        assert measured is not None, "a training has a file or a measured set-up"
        source = Source("--from", {"name": f"{measured.cell.policy}-{measured.cell.cell_id}"}, {(): "--from"})
        path = Path("--from")
    else:
        path = find_file(Path(path), TRAINING_FILES)
        source = read_source(path)
        refuse_matrix(source)
    problems = list(source.problems)
    if measured is not None:
        problems += add_measured_values(source, measured)
        problems += incomplete_data(source, overrides or {}, measured)
    problems += apply_overrides(source, overrides or {})
    policies, policy_dirs, unresolved = resolve_policies(source, path, policy_dirs)
    problems += unresolved
    parsed: TrainFile | None = None
    try:
        parsed = TrainFile.model_validate(source.values, context={"policies": policies})
    except ValidationError as error:
        problems += problems_of(error, TrainFile, source, problems)
    problems += [Problem(source.where(()), f"training needs {key}") for key in REQUIRED if key not in source.values]
    problems += check_data(source)
    if parsed is not None:
        problems += _check_validation(parsed, source)
    if parsed is None or problems:
        raise ConfigurationError(in_order(problems))
    attention = {"attention": default_attention(policies[parsed.explicit_values()["policy"]])}
    data = data_spec(parsed.data) if measured is None or "data" in source.values else measured.cell.data
    cell = Cell(**(attention | parsed.explicit_values()), data=data, optim=optim_spec(parsed.optim))
    problems += check_policies([cell], cell.data, source, policies)
    if parsed.validation.weights == "averages" and cell.optim.ema_decay is None:
        hint = "set optim.ema_decay, or leave out validation.weights"
        problems.append(Problem(source.where(("validation", "weights")), "there are no averages of the weights", hint))
    if parsed.validation.every and not cell.data.validation:
        hint = "write data: {validation: 0.1}, or leave out validation.every"
        problems.append(Problem(source.where(("validation", "every")), "the data have no validation episodes", hint))
    if impossible := backend_info(cell.backend).refusal(cell):
        problems.append(Problem(source.where(("backend",)), impossible))
    if excluded := fields_refusal(cell):
        field, reason = excluded
        problems.append(Problem(source.where((field,)), reason))
    if problems:
        raise ConfigurationError(in_order(problems))
    return TrainConfig(
        name=parsed.name,
        cell=cell,
        steps=parsed.steps,
        log_every=parsed.log_every,
        hang_after_s=parsed.hang_after_s,
        trackers=tuple(parsed.trackers),
        **{name: getattr(parsed, name) for name in SECTIONS},
        policy_dirs=tuple(policy_dirs),
    )


def _check_validation(parsed: TrainFile, source: Source) -> Iterator[Problem]:
    """Yield what validations lack, alone or to choose the best checkpoints."""
    saved, every = parsed.checkpoint.every, parsed.validation.every
    if parsed.checkpoint.keep_best is not None:
        where = source.where(("checkpoint", "keep_best"))
        if not every:
            yield Problem(where, "keep_best needs a validation that scores checkpoints", "add validation, or remove it")
        elif not saved:
            yield Problem(where, "keep_best chooses among checkpoints, and checkpoint.every is 0", "save some, or remove it")
        elif saved % every:
            message = f"keep_best needs a validation at every checkpoint, and {saved} is no multiple of {every}"
            yield Problem(where, message, "make checkpoint.every a multiple of validation.every")
    if (given := parsed.validation.model_fields_set) and "every" not in given:
        hint = "give validation.every, the steps between validations; 0 for none"
        yield Problem(source.where(("validation",), key=True), "nothing is validated without every", hint)


def schedule_note(config: TrainConfig) -> str | None:
    """Return a line if the training or its schedule ends before the learning rate has reached `optim.lr`; else None."""
    optim = config.cell.optim
    ends_before = optim.schedule == "warmup_cosine" and optim.total_steps < config.steps
    steps = optim.total_steps if ends_before else config.steps
    if optim.schedule == "constant" or steps > optim.warmup_steps:
        return None
    limit = f"schedule ends in the warm-up: optim.total_steps is {steps}"
    if not ends_before:
        limit = f"training ends in the warm-up: steps is {steps}"
    highest = steps / (optim.warmup_steps + 1)
    return (
        f"the {limit} and optim.warmup_steps is {optim.warmup_steps}, so the highest learning rate is {highest:.1%} of "
        "optim.lr; lower optim.warmup_steps, or write optim.schedule: constant"
    )


def locate_problems(problems: Sequence[Problem], path: str | Path, overrides: Mapping[str, str]) -> list[Problem]:
    """Return problems whose position is a key of the training file, such as `optim.groups[0].match`, at its line and column."""
    source = read_source(find_file(Path(path), TRAINING_FILES))
    apply_overrides(source, overrides)
    located = []
    for problem in problems:
        keys = tuple(int(key) if key.isdigit() else key for key in re.findall(r"\w+", problem.where))
        is_key = bool(keys) and keys[0] in TrainFile.model_fields
        located.append(replace(problem, where=source.where(keys)) if is_key else problem)
    return located
