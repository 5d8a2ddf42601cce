"""`benchbox audit-precision`: the dtypes that a training run really stores and steps, and precision errors in them."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.options import LauncherName, PolicyDirOption
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
    """Output format of an audit."""

    text = "text"
    json = "json"
    sarif = "sarif"
    junit = "junit"


class FailOn(StrEnum):
    """The mildest severity that fails an audit. An optimizer that cannot be read always does."""

    error = "error"
    warning = "warning"


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
        typer.Argument(metavar="-- CMD", help="Any training command, run unmodified.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A checkpoint of any library: a file or a folder.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Policy of a session.")] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Backend of a session: see benchbox list backends.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Precision of a session, or the intended precision of a command: see benchbox list recipes."
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="The policy's preset.", show_default="tiny")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks.", show_default="the minimum of the backend")
    ] = None,
    beta2: Annotated[float | None, typer.Option(min=0.0, help="AdamW's second beta.", show_default="as in a matrix")] = None,
    data: Annotated[Data | None, typer.Option(help="Data of a session.", show_default="synthetic")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Optimizer steps: observed ones of a command, of a session those before the observed ones.",
            show_default=f"{COMMAND_STEPS}, {SESSION_STEPS}",
        ),
    ] = None,
    launcher: Annotated[
        LauncherName | None, typer.Option(help="Launcher of a session: as of benchbox run.", show_default="local")
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop/--no-stop", help="End the command once every rank has taken the observed steps.")
    ] = False,
    suppressions: Annotated[Path | None, typer.Option(metavar="FILE", help="YAML: findings to ignore, with reasons.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output of an earlier --format json: its findings do not fail this audit."),
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="The mildest finding that fails the audit.")] = FailOn.error,
    output: Annotated[AuditFormat, typer.Option("--format", help="Output format.")] = AuditFormat.text,
) -> None:
    """Find precision errors in the steps of a training.

    Reports the dtypes of parameters, gradients and optimizer state, and what is wrong with them. The subject is one of: a
    session of benchbox (--policy P --backend B --recipe R), a checkpoint (--checkpoint PATH), or any training command (--
    torchrun --nproc_per_node 2 train.py ...), which runs unmodified and need not know benchbox.

    Exit code 4 when a rule finds an error (or a warning, with --fail-on warning), or an optimizer that cannot be read; 3 when
    the steps themselves failed or were not observed.
    """
    session = {
        "policy": policy,
        "backend": backend,
        "size": size,
        "world-size": world_size,
        "beta2": beta2,
        "data": data,
        "launcher": launcher,
        "policy-dir": policy_dirs or None,
    }
    if checkpoint is not None and steps is not None:
        raise ConfigurationError(Problem("--steps", "goes with a session or a command", "a checkpoint takes no steps"))
    _check_subject(bool(command), checkpoint is not None, {name for name, value in session.items() if value is not None}, stop)
    selection = _selection(select, ignore, suppressions, baseline)
    if command:
        subject = command_subject(
            command,
            steps=steps or COMMAND_STEPS,
            stop=stop,
            quiet_stdout=output is not AuditFormat.text,
            recipe=recipe,
            notify=print_to_stderr,
        )
    elif checkpoint is not None:
        subject = checkpoint_subject(checkpoint, recipe=recipe)
    else:
        subject = session_subject(
            SessionRequest(
                policy=_required("--policy", policy),
                backend=_required("--backend", backend),
                recipe=_required("--recipe", recipe),
                size=size or "tiny",
                world_size=world_size,
                beta2=beta2,
                data=(data or Data.synthetic).value,
                steps=steps or SESSION_STEPS,
                policy_dirs=policy_dirs,
                launcher=launcher or LauncherName.local,
            )
        )
    if command and output is AuditFormat.text:
        typer.echo()  # separates the report from the output of the command
    _print_audit(subject, selection, output, fail_on)


def _check_subject(command: bool, checkpoint: bool, session: set[str], stop: bool) -> None:
    """Raise ConfigurationError for options that name several subjects, or none."""
    if command and checkpoint:
        raise ConfigurationError(Problem("--checkpoint", "a command is given as well", "audit one after the other"))
    if (command or checkpoint) and session:
        subject = "a command" if command else "a checkpoint"
        hint = f"leave it out: {subject} is audited as it is"
        raise ConfigurationError([Problem(f"--{name}", "goes with a session of benchbox", hint) for name in sorted(session)])
    if stop and not command:
        raise ConfigurationError(Problem("--stop", "goes with a command", "give one: -- torchrun train.py"))
    if not (command or checkpoint or session):
        raise ConfigurationError(
            "nothing to audit: give --policy, --backend and --recipe, or --checkpoint PATH, or -- and a training command"
        )


def _required(option: str, value: str | None) -> str:
    if value is None:
        raise ConfigurationError(Problem(option, "a session needs it", "give --policy, --backend and --recipe"))
    return value


def _selection(select: list[str], ignore: list[str], suppressions: Path | None, baseline: Path | None) -> "Selection":
    from benchbox.audit.selection import Selection, load_baseline, load_suppressions, parse_codes

    return Selection(
        select=parse_codes(select, "--select"),
        ignore=parse_codes(ignore, "--ignore"),
        suppressions=load_suppressions(suppressions) if suppressions else (),
        baseline=load_baseline(baseline) if baseline else frozenset(),
    )


def _print_audit(subject: Subject, selection: "Selection", output: AuditFormat, fail_on: FailOn) -> None:
    """Print the audit. Raise an error, shown as one line on stderr, if the subject or the audit failed."""
    from benchbox.audit.judge import judge
    from benchbox.report.audit import write_audit

    judgement = judge(subject.facts, selection)
    warnings = fail_on is FailOn.warning
    write_audit(
        output.value,
        subject.title,
        subject.metadata,
        subject.facts,
        judgement,
        warnings=warnings,
        failure=subject.failure,
    )
    if subject.note:
        print_to_stderr(subject.note)
    if subject.failure:
        raise CellFailedError(subject.failure)
    if failing := judgement.failing(warnings=warnings):
        raise ThresholdError(f"{subject.name} does not pass {', '.join(failing)}")
