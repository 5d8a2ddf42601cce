"""Training files: one cell, the number of its steps, and its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.attention import attention_refusal, default_attention
from benchbox.registry.modes import mode_refusal
from benchbox.registry.names import did_you_mean
from benchbox.spec.cell import Cell
from benchbox.spec.checks import REQUIRED
from benchbox.spec.data_checks import check_data
from benchbox.spec.files import TRAINING_FILES, find_file
from benchbox.spec.load import data_spec, optim_spec
from benchbox.spec.overrides import apply_overrides
from benchbox.spec.policies import resolve_policies
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.schema import NamedFile
from benchbox.spec.source import read_source
from benchbox.spec.types import Count, Strict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CheckpointFile(Strict):
    every: Annotated[int, Field(ge=0)] = 1000
    """Steps between checkpoints; 0 for none, not even at the end."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""


class TrainFile(NamedFile):
    """A policy to train, and the set-up to train it with."""

    steps: Count
    """Optimizer steps in all."""
    log_every: Count = 10
    """Steps between lines on the screen; every step is in `metrics.jsonl`."""
    checkpoint: CheckpointFile = CheckpointFile()
    """What survives an interruption."""
    hang_after_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress of any rank after which the training is called hung and ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run, resolved. `cell` is the one that a benchmark of the same set-up would measure."""

    name: str
    cell: Cell
    steps: int
    log_every: int
    checkpoint_every: int
    keep: int
    hang_after_s: float
    policy_dirs: tuple[Path, ...] = field(default=(), compare=False)  # those in the file included; not stored

    def to_dict(self) -> dict[str, Any]:
        values = {**asdict(self), "cell": self.cell.to_dict()}
        del values["policy_dirs"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        return cls(**{**values, "cell": Cell.from_dict(values["cell"])})


def load_train(path: str | Path, overrides: Mapping[str, str] | None = None, policy_dirs: Sequence[Path] = ()) -> TrainConfig:
    """Read and check a training file, by path or by name (see `find_file`); `overrides` as for `load_matrix`.

    Raises:
        ConfigurationError: with every problem of the file, top to bottom, each at its line and column.
    """
    path = find_file(Path(path), TRAINING_FILES)
    source = read_source(path)
    problems = [*source.problems, *apply_overrides(source, overrides or {})]
    policies, policy_dirs, unresolved = resolve_policies(source, path, policy_dirs)
    problems += unresolved
    parsed: TrainFile | None = None
    try:
        parsed = TrainFile.model_validate(source.values, context={"policies": policies})
    except ValidationError as error:
        problems += problems_of(error, TrainFile, source)
    problems += [Problem(source.where(()), f"training needs {key}") for key in REQUIRED if key not in source.values]
    problems += check_data(source)
    if parsed is None or problems:
        raise ConfigurationError(in_order(problems))
    entry = policies[parsed.explicit_values()["policy"]]
    attention = {"attention": default_attention(entry)}
    cell = Cell(**(attention | parsed.explicit_values()), data=data_spec(parsed.data), optim=optim_spec(parsed.optim))
    if cell.size not in (presets := entry.presets):
        message = f"policy {cell.policy} has no size {cell.size!r}"
        problems.append(Problem(source.where(("size",)), message, did_you_mean(cell.size, presets)))
    if refusal := attention_refusal(entry, cell.attention):
        problems.append(Problem(source.where(("attention",)), *refusal))
    if refusal := mode_refusal(entry, cell.data.mode):
        problems.append(Problem(source.where(("data", "mode")), *refusal))
    if problems:
        raise ConfigurationError(in_order(problems))
    return TrainConfig(
        name=parsed.name,
        cell=cell,
        steps=parsed.steps,
        log_every=parsed.log_every,
        checkpoint_every=parsed.checkpoint.every,
        keep=parsed.checkpoint.keep,
        hang_after_s=parsed.hang_after_s,
        policy_dirs=tuple(policy_dirs),
    )
