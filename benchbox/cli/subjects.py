"""Checkpoints and commands, as `benchbox audit-precision` is asked about them: from words to the facts of every rank."""

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
    """What was audited: `name` in short, `title` for people, `told` for programs. `failure` says how it failed by itself."""

    name: str
    title: str
    told: Mapping[str, Any]
    facts: Sequence["RankFacts"]
    failure: str | None = None


def check_recipe(name: str) -> None:
    """Refuse a recipe that there is not.

    Raises:
        ConfigurationError: and what was probably meant.
    """
    from benchbox.registry.names import did_you_mean
    from benchbox.registry.recipes import RECIPES

    if name not in RECIPES:
        raise ConfigurationError(Problem("--recipe", f"unknown recipe {name!r}", did_you_mean(name, RECIPES)))


def _declared(facts: Sequence["RankFacts"], recipe: str | None) -> list["RankFacts"]:
    """The facts with what a known recipe declares; without one nothing is."""
    from benchbox.audit.subjects.contract import contract
    from benchbox.registry.recipes import RECIPES

    return [each if recipe is None else replace(each, contract=contract(RECIPES[recipe])) for each in facts]


def checkpoint_subject(path: Path, *, recipe: str | None) -> Subject:
    """Read what a checkpoint holds. `recipe` is what it is declared to come from.

    Raises:
        ConfigurationError: there is no such recipe.
        DataError: it is no checkpoint, or damaged.
    """
    from benchbox.audit.subjects.checkpoint import read_checkpoint

    if recipe is not None:
        check_recipe(recipe)
    return Subject(
        name=str(path),
        title=f"checkpoint {path}",
        told={"kind": "checkpoint", "path": str(path), "recipe": recipe},
        facts=_declared(read_checkpoint(path), recipe),
    )


def command_subject(
    command: Sequence[str], *, steps: int, stop: bool, quiet_stdout: bool, recipe: str | None, say: Callable[[str], None]
) -> Subject:
    """Run a command with a witness in every Python it starts.

    Args:
        steps: how many optimizer steps to look at.
        stop: end the command when every rank has been through them.
        quiet_stdout: our stdout is for the report alone.
        recipe: what the command is declared to be.
        say: told, while the command runs and after it, what it does not say itself.

    Raises:
        CellFailedError: no step was seen.
        ConfigurationError: there is no such command or recipe.
    """
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

    def enough() -> bool:
        nonlocal announced
        if not announced and (ranks := count_finished_ranks(reports_folder(folder))):
            announced = True
            say(f"{steps} steps seen on {_ranks(ranks)}; the command {'is ended' if stop else 'runs on'}")
        return announced and stop

    with tempfile.TemporaryDirectory(prefix="benchbox-audit-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        variables = inject(folder, steps, os.environ)
        ending = run_command(command, variables=variables, quiet_stdout=quiet_stdout, enough=enough)
        found = read_trainings(reports_folder(folder))
        if not found:
            first = f"the command failed ({ending.failure}), and " if ending.failure else ""
            raise CellFailedError(f"{first}no optimizer step was seen: {explain_no_steps(reports_folder(folder))}")
    training = select_training(found)
    for note in list_limitations(training, of=len(found), steps=steps):
        say(note)
    return Subject(
        name="the command",
        title=f"{shlex.join(command)}: {training.steps} {'step' if training.steps == 1 else 'steps'} seen",
        told={
            "kind": "command",
            "command": list(command),
            "exit_code": ending.code,
            "stopped": ending.stopped,
            "steps": training.steps,
            "ranks": [facts.rank for facts in training.ranks],
            "world_size": training.world_size,
            "recipe": recipe,
        },
        facts=_declared(training.ranks, recipe),
        failure=_failure(ending, training),
    )


def _failure(ending: "CommandResult", training: "Training") -> str | None:
    """What kept the command, or us, from going through with it."""
    return f"the command failed: {ending.failure}" if ending.failure else observer_failure(training.ranks)


def observer_failure(ranks: Sequence["RankFacts"]) -> str | None:
    """What a witness failed at: what it then says is not the whole, and nothing has passed."""
    found = [f"rank {facts.rank}: {facts.problems[0]}" for facts in ranks if facts.problems]
    return f"the witness stopped watching on {found[0]}" if found else None


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def print_to_stderr(line: str) -> None:
    print(f"benchbox: {line}", file=sys.stderr, flush=True)
