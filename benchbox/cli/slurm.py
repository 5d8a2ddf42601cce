"""`--launcher slurm` of `run` and `train`: the command that the job runs, and following the job."""

import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.analysis.quantities import counted
from benchbox.cli.options import TrainingLauncherName
from benchbox.errors import EXIT_STOPPED, ConfigurationError, Problem

if TYPE_CHECKING:
    from benchbox.launch.slurm.job import JobState, SlurmJob
    from benchbox.launch.slurm.options import SlurmOptions


SlurmOption = Annotated[
    list[str],
    typer.Option(
        "--slurm",
        metavar="KEY=VALUE,..",
        default_factory=list,
        show_default=False,
        help="Resources for --launcher slurm, by options of sbatch: nodes=2,gpus_per_node=8,cpus_per_task=64,time=01:00:00.",
    ),
]


def slurm_options(launcher: TrainingLauncherName, texts: Sequence[str], nnodes: int) -> "SlurmOptions | None":
    """Return the resources of a job; None for another launcher.

    Raises:
        ConfigurationError: an option is wrong, or belongs to another launcher.
    """
    from benchbox.launch.slurm.options import parse_slurm_options

    if launcher is not TrainingLauncherName.slurm:
        if texts:
            raise ConfigurationError(Problem(f"--slurm {texts[0]}", "has no effect", "add --launcher slurm"))
        return None
    if nnodes != 1:
        raise ConfigurationError(Problem("--nnodes", "has no effect with --launcher slurm", f"use --slurm nodes={nnodes}"))
    return parse_slurm_options(texts)


def check_gpus(slurm: "SlurmOptions", world_sizes: "Iterable[int]") -> None:
    """Refuse cells of more ranks on a node than it is asked to have GPUs, and warn where no cell uses all of them.

    Raises:
        ConfigurationError: with both numbers.
    """
    gpus, ranks = slurm.gpus_per_node, max(-(-size // slurm.nodes) for size in world_sizes)
    if gpus is None:
        return
    if ranks > gpus:
        message = f"world_size puts {ranks} ranks on a node, and each needs a GPU of its own"
        raise ConfigurationError(Problem(f"--slurm gpus_per_node={gpus}", message, "lower world_size, or ask for more"))
    if ranks < gpus:
        used = f"world_size puts {counted(ranks, 'rank')} on a node, the other GPUs are idle"
        print(f"warning: --slurm gpus_per_node={gpus}: {used}", file=sys.stderr)


def job_command(
    verb: str,
    file: Path,
    slurm: "SlurmOptions",
    *,
    out: Path,
    sets: Sequence[str],
    policy_dirs: Sequence[Path],
    node_timeout: float,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command that a job runs on each of its nodes.

    Args:
        node_timeout: `--node-timeout`, seconds; of one node it has no meaning.
        more: further options of the verb.
    """
    command = [sys.executable, "-m", "benchbox.cli.app", verb, str(file.resolve()), "--out", str(out.resolve())]
    command += [word for text in sets for word in ("--set", text)]
    command += [word for folder in policy_dirs for word in ("--policy-dir", str(folder.resolve()))]
    launcher = ["local"] if slurm.nodes == 1 else ["torchrun", "--node-timeout", f"{node_timeout:g}"]
    return [*command, *more, "--launcher", *launcher]


def render(name: str, command: Sequence[str], out: Path, slurm: "SlurmOptions", requeued: str | None = None) -> str:
    """Return the script of a job for a run directory; see `render_script`."""
    from benchbox.launch.slurm.script import render_script

    logs = out.resolve() / "slurm"
    return render_script(slurm, name=name, command=command, folder=Path.cwd(), logs=logs, requeued=requeued)


def submit_and_follow(script: str, out: Path) -> "tuple[SlurmJob, JobState]":
    """Submit a job, unless the last one of this folder is still active, and follow it; return it and its last state.

    Only Ctrl-C cancels the job. SIGTERM and SIGHUP, which the end of a connection sends, leave it.

    Raises:
        typer.Exit: the user stopped.
        SlurmError: Slurm refused the job, or does not answer.
    """
    from benchbox.launch.process.signals import handle_stop_signals
    from benchbox.launch.slurm.job import SlurmJob

    received: list[int] = []
    with handle_stop_signals(received.append):  # from before the job is there: one that nobody knows of would go on
        job = SlurmJob(out)
        if job.id is None or not job.state().active:
            job.submit(script)
            print(f"submitted {out / 'slurm' / 'job.sh'} as Slurm job {job.id}; output: {job.log}", flush=True)
        else:
            print(f"Slurm job {job.id} of this folder is not done: following it instead of submitting another", flush=True)
        state = job.follow(lambda: bool(received), _print_line)
        if state is not None:
            return job, state
        if signal.SIGINT in received:
            job.cancel(_print_line)
            print(f"cancelled Slurm job {job.id}; the same command submits what is missing", file=sys.stderr)
        else:
            name, hint = signal.Signals(received[0]).name, f"the same command follows it again; scancel {job.id} cancels it"
            print(f"stopped following Slurm job {job.id} on {name}: the job goes on; {hint}", file=sys.stderr)
    raise typer.Exit(EXIT_STOPPED)


def _print_line(line: str) -> None:
    print(line, flush=True)
