"""`benchbox doctor`: checks of this machine, with a remedy for each that fails."""

import subprocess
import sys
from typing import Annotated

import typer

from benchbox.cli.links import measure_and_keep
from benchbox.cli.machine_checks import check_machine, rank_variables
from benchbox.cli.peaks import measure_and_keep_peaks
from benchbox.errors import EXIT_CELL_FAILED, CellFailedError, ConfigurationError


def doctor(
    compile_extension: Annotated[
        bool, typer.Option("--compile", help="Compile DeepSpeed's CPU extension now, so that no launch has to.")
    ] = False,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure the links between ranks of this machine, for benchbox estimate and reports."),
    ] = False,
    peaks: Annotated[
        bool,
        typer.Option(
            "--peaks", help="Measure what ranks reach in products, copies and all-reduces, for benchbox profile and reports."
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="N", help="With --links or --peaks: ranks.", show_default="GPUs, or 2 on the CPU"),
    ] = None,
) -> None:
    """Check this machine. Exits with 3, as a run would, when something that every cell needs is missing.

    With --links, all-reduce, all-gather, reduce-scatter and broadcast of 1 KiB to 64 MiB are timed instead, and latency and
    bandwidth are fitted to each. With --peaks, ranks that all work at once measure FLOP/s of matrix products by dtype and class
    of shape, and bytes/s of copies and all-reduces. Both are kept in the user's cache, by machine.
    """
    from benchbox.cli.capacity import check_capacity
    from benchbox.measure.environment import environment

    machine = environment()
    if ranks is not None and not (links or peaks):
        raise ConfigurationError("--ranks is for --links and --peaks: the checks start no ranks")
    if compile_extension and not machine["devices"]:
        _compile_extension()
    if links or peaks:
        group = len(machine["devices"]) or 2 if ranks is None else ranks
        check_capacity("--ranks", group)
        if links:
            measure_and_keep(machine["machine"], group)
        if peaks:
            measure_and_keep_peaks(machine["machine"], group)
        return
    checks = list(check_machine(machine))
    for check in checks:
        print(f"{check.state:<9}{check.name:<15}{check.detail}")
        if check.remedy:
            print(f"{'':<9}{'':<15}-> {check.remedy}")
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(EXIT_CELL_FAILED)


def _compile_extension() -> None:
    """Compile DeepSpeed's CPU extension in a process with the environment variables of a rank.

    Raises:
        CellFailedError: it cannot be compiled; the output of the compiler is on stderr.
    """
    from benchbox.registry.phases import STAGE_TEXTS

    print(STAGE_TEXTS["compile_extension"], flush=True)
    command = [sys.executable, "-c", "from benchbox.backends.extension import build_extension; build_extension()"]
    if subprocess.run(command, env=rank_variables() | {"DS_ACCELERATOR": "cpu"}, stdout=sys.stderr, check=False).returncode:
        raise CellFailedError("DeepSpeed's CPU extension could not be compiled: the output of the compiler is above")
