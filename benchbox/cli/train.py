"""`benchbox train`: the complete trainer, with the same step that `benchbox run` measures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchbox.cli.options import LauncherName, LauncherOption, PolicyDirOption, SetOption
from benchbox.errors import EXIT_CELL_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.spec.train import TrainConfig

_EXIT_STOPPED = 130

ConfigArgument = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A training file, or the name of one in matrices/train/.", show_default=False),
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Output folder.", show_default="runs/train/<name of the config>")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest checkpoint; start anew if there is none.")
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    config: ConfigArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    out: OutOption = None,
    resume: ResumeOption = False,
    launcher: LauncherOption = LauncherName.local,
) -> None:
    """Train a policy with the step that `benchbox run` measures: the same seed gives bit-identical losses.

    The output folder gets metrics.jsonl with the metrics of every step, and checkpoints/ with everything needed to resume.

    Exit code 3 when a rank failed, 130 when it was stopped.
    """
    from rich.console import Console

    from benchbox.cli.statistics import prepare_statistics
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.lock import lock_run_directory
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.training import launch_training
    from benchbox.spec import parse_overrides
    from benchbox.spec.train import load_train

    loaded = load_train(config, parse_overrides(sets), policy_dirs)
    folder = out or Path("runs") / "train" / loaded.name
    prepare_statistics(loaded.cell.data, Console(highlight=False))
    printer = _MetricsPrinter(loaded)
    with lock_run_directory(folder), stop_on_signals() as stop:
        outcome = launch_training(
            loaded,
            folder,
            resume=resume,
            launcher=make_launcher(launcher),
            policy_dirs=loaded.policy_dirs,
            on_metrics=printer.print_row,
            stop=stop,
        )
    _exit(outcome, folder)


class _MetricsPrinter:
    """Prints one line about the data, one every `log_every` steps, and one for the last step."""

    def __init__(self, config: "TrainConfig") -> None:
        self._config = config
        self._started = False

    def print_row(self, row: "Mapping[str, Any]") -> None:
        from benchbox.launch.progress import format_clock

        config, step = self._config, int(row["step"]) + 1
        if not self._started:
            print(config.cell.data.reading)
            self._started = True
        if "warning" in row:
            print(f"warning: {row['warning']}", file=sys.stderr, flush=True)
        if step % config.log_every and step != config.steps:
            return
        remaining_s = (config.steps - step) * row["step_s"]
        print(
            f"step {step}/{config.steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}"
            f"  {row['samples'] / row['step_s']:.3g} samples/s"
            + (f"  {format_clock(remaining_s)} left" if remaining_s >= 1 else ""),
            flush=True,
        )


def _exit(outcome: "Outcome", folder: Path) -> None:
    from benchbox.store.checkpoints import list_checkpoints

    checkpoints = list_checkpoints(folder / "checkpoints")
    newest = f"newest checkpoint: {checkpoints[-1]}" if checkpoints else "no checkpoint"
    if outcome.status == "ok":
        print(f"done; {newest}; metrics: {folder / 'metrics.jsonl'}")
        return
    if outcome.status == "interrupted":
        print(f"stopped; {newest}; continue with --resume", file=sys.stderr)
        raise typer.Exit(_EXIT_STOPPED)
    error = outcome.error
    assert error is not None, "every other status has an error"
    location = f" (rank {error['rank']}, {error['phase'] or 'outside a step'})" if error["rank"] is not None else ""
    print(f"error: {outcome.status}: {error['type']}: {error['message']}{location}; {newest}", file=sys.stderr)
    print(f"error: logs of each rank: {folder / 'launch'}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE if error["type"] in {"ConfigurationError", "DataError"} else EXIT_CELL_FAILED)
