"""Checkpoints and commands as subjects of `benchbox audit-precision`: from command-line options to the facts of every rank."""

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.errors import CellFailedError, ConfigurationError, Problem

if TYPE_CHECKING:
    from benchbox.audit.subjects.command.process_reports import Training
    from benchbox.launch.process.command import CommandResult
    from benchbox.observer.facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Audited training run or checkpoint."""

    name: str  # short, for error messages
    title: str  # for people
    metadata: Mapping[str, Any]  # for programs
    facts: Sequence["RankFacts"]
    failure: str | None = None  # of the subject itself, whatever the rules find
    note: str | None = None  # what no rule could look at, to be read after "found: nothing"


def check_recipe(name: str) -> None:
    """Raise ConfigurationError, with a suggestion, for an unknown recipe."""
    from benchbox.registry.names import did_you_mean
    from benchbox.registry.recipes import recipes

    if name not in recipes():
        raise ConfigurationError(Problem("--recipe", f"unknown recipe {name!r}", did_you_mean(name, recipes())))


def _with_contract(facts: Sequence["RankFacts"], recipe: str | None) -> list["RankFacts"]:
    """Return the facts with the contract of a recipe, or unchanged where no recipe is given."""
    from benchbox.audit.subjects.contract import recipe_contract
    from benchbox.registry.recipes import recipes

    return [rank if recipe is None else replace(rank, contract=recipe_contract(recipes()[recipe])) for rank in facts]


def checkpoint_subject(path: Path, *, recipe: str | None) -> Subject:
    """Read the facts of a checkpoint.

    Args:
        path: file or folder of the checkpoint.
        recipe: declared precision of the training that wrote it.

    Raises:
        ConfigurationError: there is no such recipe.
        DataError: it is no checkpoint, or damaged.
    """
    from benchbox.audit.subjects.checkpoint import read_checkpoint

    if recipe is not None:
        check_recipe(recipe)
    facts = _with_contract(read_checkpoint(path), recipe)
    has_optimizer = any(rank.stepped or rank.opaque for rank in facts)
    return Subject(
        name=str(path),
        title=f"checkpoint {path}",
        metadata={"kind": "checkpoint", "path": str(path), "recipe": recipe},
        facts=facts,
        note=None if has_optimizer else "no optimizer state: the precision of training was not judged",
    )


def command_subject(
    command: Sequence[str], *, steps: int, stop: bool, quiet_stdout: bool, recipe: str | None, notify: Callable[[str], None]
) -> Subject:
    """Run a command with an observer in every Python it starts.

    Args:
        command: program and arguments.
        steps: number of optimizer steps to observe.
        stop: end the command once every rank has taken these steps.
        quiet_stdout: keep stdout for the report; the command's goes to stderr.
        recipe: declared precision of the command.
        notify: receives one-line notes while the command runs and after it.

    Raises:
        CellFailedError: no optimizer step was observed.
        ConfigurationError: there is no such command or recipe.
    """
    from benchbox.analysis.quantities import counted
    from benchbox.audit.subjects.command.inject import inject, reports_folder
    from benchbox.audit.subjects.command.process_reports import (
        count_finished_ranks,
        explain_no_steps,
        list_limitations,
        read_trainings,
        select_training,
    )
    from benchbox.launch.process.command import run_command

    if recipe is not None:
        check_recipe(recipe)
    announced = False

    def should_stop() -> bool:
        nonlocal announced
        if not announced and (ranks := count_finished_ranks(reports_folder(folder))):
            announced = True
            notify(f"{steps} steps seen on {counted(ranks, 'rank')}; the command {'is ended' if stop else 'runs on'}")
        return announced and stop

    with tempfile.TemporaryDirectory(prefix="benchbox-audit-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        variables = inject(folder, steps, os.environ)
        result = run_command(command, variables=variables, quiet_stdout=quiet_stdout, should_stop=should_stop)
        trainings = read_trainings(reports_folder(folder))
        if not trainings:
            cause = f"the command failed ({result.failure}), and " if result.failure else ""
            raise CellFailedError(f"{cause}no optimizer step was seen: {explain_no_steps(reports_folder(folder))}")
    training = select_training(trainings)
    for note in list_limitations(training, trainings=len(trainings), steps=steps):
        notify(note)
    return Subject(
        name="the command",
        title=f"{shlex.join(command)}: {counted(training.steps, 'step')} seen",
        metadata={
            "kind": "command",
            "command": list(command),
            "exit_code": result.exit_code,
            "stopped": result.stopped,
            "steps": training.steps,
            "ranks": [facts.rank for facts in training.ranks],
            "world_size": training.world_size,
            "recipe": recipe,
        },
        facts=_with_contract(training.ranks, recipe),
        failure=_failure(result, training),
    )


def _failure(result: "CommandResult", training: "Training") -> str | None:
    """Return the failure of the command or of an observer in it, or why no step was seen, if any."""
    from benchbox.audit.subjects.command.process_reports import explain_unseen_steps

    if result.failure:
        return f"the command failed: {result.failure}"
    return observer_failure(training.ranks) or explain_unseen_steps(training)


def observer_failure(ranks: Sequence["RankFacts"]) -> str | None:
    """Return the first failure of an observer, after which its facts are incomplete and the audit cannot pass, or None."""
    problems = [f"rank {facts.rank}: {facts.problems[0]}" for facts in ranks if facts.problems]
    return f"the observer stopped watching on {problems[0]}" if problems else None


def print_to_stderr(line: str) -> None:
    print(f"benchbox: {line}", file=sys.stderr, flush=True)
