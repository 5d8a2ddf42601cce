"""The `benchbox` command: registers the verbs and converts errors to one line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module

import typer

from benchbox import __version__
from benchbox.errors import EXIT_INTERNAL, EXIT_STOPPED, EXIT_USAGE, MAKE_ROOM, BenchboxError

# Module and function of each verb, or its group of verbs. Modules import what they need inside their functions:
# `benchbox --help` must not load torch.
VERBS = {
    "run": "run:run",
    "plan": "plan:plan",
    "profile": "profile:profile",
    "estimate": "estimate:estimate",
    "audit-precision": "audit:audit_precision",
    "train": "train:train",
    "validate": "validate:validate",
    "eval": "eval:evaluate_checkpoint",
    "export": "export:export",
    "report": "report:report",
    "compare": "compare:compare",
    "site": "site:site",
    "check": "check:check",
    "baseline": "check:baselines",
    "noise": "noise:noise",
    "verify": "verify:verify",
    "data": "data:data",
    "list": "listing:list_registered",
    "explain": "explain:explain",
    "doctor": "doctor:doctor",
}

app = typer.Typer(
    name="benchbox",
    help="Which set-up trains this policy fastest in the memory I have, and is it numerically what I think it is?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"benchbox {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


for name, target in VERBS.items():
    module, _, attribute = target.partition(":")
    verb = getattr(import_module(f"benchbox.cli.{module}"), attribute)
    if isinstance(verb, typer.Typer):
        app.add_typer(verb, name=name)
    else:
        # What follows the first argument of an audit belongs to the audited command.
        app.command(name, context_settings={"allow_interspersed_args": name != "audit-precision"})(verb)


# Errors of the place that output goes to, with what to do about them. Any other OSError is a bug.
_OUTPUT_ERRORS = {
    errno.ENOSPC: f"; {MAKE_ROOM}",
    errno.EDQUOT: f"; {MAKE_ROOM}",
    errno.EROFS: "; write elsewhere",
    errno.EISDIR: "; name a file",
    errno.ENOTDIR: "; write elsewhere",
    errno.EEXIST: "; write elsewhere",
    errno.EACCES: "",
    errno.EPERM: "",
    errno.EFBIG: "",
    errno.ENAMETOOLONG: "; name a shorter one",
    errno.EIO: "",
}


def main() -> None:
    """Run the command line.

    A BenchboxError is printed as one line, and so is output that cannot be written; any other exception is a bug and shows its
    traceback.
    """
    try:
        try:
            app(prog_name="benchbox")  # also under `python -m`: completion is installed for this name
        finally:
            sys.stdout.flush()  # an error here has an exit code of ours; one at the exit of Python would not
    except BenchboxError as error:
        for line in str(error).splitlines() or [type(error).__name__]:
            if not line.isprintable():
                from benchbox.report.unprintable import escape_unprintable

                line = escape_unprintable(line)
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_STOPPED)
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(EXIT_INTERNAL)
    except OSError as error:
        if (remedy := _OUTPUT_ERRORS.get(error.errno or 0)) is None:
            raise
        _discard_stdout()
        where = error.filename or "standard output"
        print(f"error: {where}: {error.strerror}{remedy}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _discard_stdout() -> None:
    """Discard what is still buffered for stdout if it cannot be written, so that Python does not try again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
