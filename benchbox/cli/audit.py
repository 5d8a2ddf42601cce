"""`benchbox audit-precision`: what a set-up really stores and steps, and what is wrong with it."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import PolicyDirOption
from benchbox.cli.session import SessionRequest, session_subject
from benchbox.cli.subjects import Subject, checkpoint_subject, command_subject, print_to_stderr
from benchbox.errors import CellFailedError, ConfigurationError, Problem, ThresholdError

if TYPE_CHECKING:
    from benchbox.audit.selection import Selection

SESSION_STEPS = 3
COMMAND_STEPS = 20


class Data(StrEnum):
    synthetic = "synthetic"
    sample = "sample"


class AuditFormat(StrEnum):
    """How to print what was found."""

    text = "text"
    json = "json"
    sarif = "sarif"
    junit = "junit"


def register(app: typer.Typer) -> None:
    """Add the verb. The first word that is no option begins the command: what follows belongs to it."""
    app.command("audit-precision", context_settings={"allow_interspersed_args": False})(audit_precision)


def audit_precision(
    policy_dirs: PolicyDirOption,
    select: Annotated[
        list[str],
        typer.Option(metavar="CODE,..", default_factory=list, show_default=False, help="Only these rules: BXP2,BXP101."),
    ],
    ignore: Annotated[
        list[str], typer.Option(metavar="CODE,..", default_factory=list, show_default=False, help="All rules but these.")
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD", help="Any training command, run as it is.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A checkpoint, of whatever library: a file or a folder.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="The policy of a session.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who shards and reduces in a session: see benchbox list backends.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A session's precision, or what a command's is meant to be: see benchbox list recipes."
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="The policy's preset.", show_default="tiny")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks.", show_default="the fewest that the backend takes")
    ] = None,
    beta2: Annotated[float | None, typer.Option(min=0.0, help="AdamW's second beta.", show_default="that of a matrix")] = None,
    data: Annotated[Data | None, typer.Option(help="What a session steps on.", show_default="synthetic")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Optimizer steps: of a command those that are watched, of a session those before.",
            show_default=f"{COMMAND_STEPS}, {SESSION_STEPS}",
        ),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop/--no-stop", help="End the command when every rank has been through its steps.")
    ] = False,
    suppressions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML: what rules must not speak of, and why.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier --format json: what was found then does not fail again.")
    ] = None,
    output: Annotated[AuditFormat, typer.Option("--format", help="How to print.")] = AuditFormat.text,
) -> None:
    """Report every dtype that training steps touch, and what is wrong with them: in parameters, gradients and optimizer state.

    One subject at a time: a session of benchbox (--policy P --backend B --recipe R), a checkpoint (--checkpoint PATH), or any
    training command (-- torchrun --nproc_per_node 2 train.py ...), which runs unmodified and need not know benchbox.

    Exit code 4 when a rule finds an error, or an optimizer that nobody can read; 3 when the steps themselves failed or were
    not seen.
    """
    session = {"policy": policy, "backend": backend, "size": size, "world-size": world_size, "beta2": beta2, "data": data}
    if checkpoint is not None and steps is not None:
        raise ConfigurationError(Problem("--steps", "goes with a session or a command", "a checkpoint takes no steps"))
    _one_subject(bool(command), checkpoint is not None, {name for name, value in session.items() if value is not None}, stop)
    selection = _selection(select, ignore, suppressions, baseline)
    if command:
        subject = command_subject(
            command,
            steps=steps or COMMAND_STEPS,
            stop=stop,
            quiet_stdout=output is not AuditFormat.text,
            recipe=recipe,
            say=print_to_stderr,
        )
    elif checkpoint is not None:
        subject = checkpoint_subject(checkpoint, recipe=recipe)
    else:
        subject = session_subject(
            SessionRequest(
                policy=_needed("--policy", policy),
                backend=_needed("--backend", backend),
                recipe=_needed("--recipe", recipe),
                size=size or "tiny",
                world_size=world_size,
                beta2=beta2,
                data=(data or Data.synthetic).value,
                steps=steps or SESSION_STEPS,
                policy_dirs=policy_dirs,
            )
        )
    if command and output is AuditFormat.text:
        typer.echo()  # apart from what the command printed
    _judged(subject, selection, output)


def _one_subject(command: bool, checkpoint: bool, session: set[str], stop: bool) -> None:
    """Refuse options that speak of two subjects, or of none."""
    if command and checkpoint:
        raise ConfigurationError(Problem("--checkpoint", "a command is given as well", "audit one after the other"))
    if (command or checkpoint) and session:
        other = "a command" if command else "a checkpoint"
        hint = f"leave it out: {other} is audited as it is"
        raise ConfigurationError([Problem(f"--{name}", "goes with a session of benchbox", hint) for name in sorted(session)])
    if stop and not command:
        raise ConfigurationError(Problem("--stop", "goes with a command", "give one: -- torchrun train.py"))
    if not (command or checkpoint or session):
        raise ConfigurationError(
            "nothing to audit: give --policy, --backend and --recipe, or --checkpoint PATH, or -- and a training command"
        )


def _needed(option: str, value: str | None) -> str:
    if value is None:
        raise ConfigurationError(Problem(option, "a session needs it", "give --policy, --backend and --recipe"))
    return value


def _selection(select: list[str], ignore: list[str], suppressions: Path | None, baseline: Path | None) -> "Selection":
    from benchbox.audit.selection import Selection, codes, load_baseline, load_suppressions

    return Selection(
        select=codes(select, "--select"),
        ignore=codes(ignore, "--ignore"),
        suppressions=load_suppressions(suppressions) if suppressions else (),
        baseline=load_baseline(baseline) if baseline else frozenset(),
    )


def _judged(subject: Subject, selection: "Selection", output: AuditFormat) -> None:
    """Print what is found. What fails is said in one line on stderr, and by the exit code."""
    from benchbox.audit.judge import judge
    from benchbox.report.audit import write_audit

    judgement = judge(subject.facts, selection)
    write_audit(output.value, subject.title, subject.told, subject.facts, judgement)
    if subject.failure:
        raise CellFailedError(subject.failure)
    if judgement.failing:
        raise ThresholdError(f"{subject.name} does not pass {', '.join(judgement.failing)}")
