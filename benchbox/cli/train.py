"""`benchbox train`: the complete trainer, around the step that is measured."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchbox.cli.options import PolicyDirOption, SetOption
from benchbox.errors import EXIT_CELL_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.launch.supervise.outcome import Outcome
    from benchbox.spec.train import TrainConfig

_EXIT_STOPPED = 130

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A training file.", show_default=False)]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where it trains.", show_default="runs/train/<name of the config>")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint; from the start if none.")]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train")(train)


def train(
    config: ConfigArgument,
    sets: SetOption,
    policy_dirs: PolicyDirOption,
    out: OutOption = None,
    resume: ResumeOption = False,
) -> None:
    """Train a policy by the step that `benchbox run` measures: the same seed gives the same losses, bit for bit.

    Metrics of every step go to metrics.jsonl, everything needed to continue to checkpoints/, both in the output folder.

    Exit code 3 when a rank failed, 130 when it was stopped.
    """
    from benchbox.launch.process.local import LocalLauncher
    from benchbox.launch.process.lock import lock_run_directory
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.training import launch_training
    from benchbox.spec import parse_overrides
    from benchbox.spec.train import load_train

    loaded = load_train(config, parse_overrides(sets), policy_dirs)
    folder = out or Path("runs") / "train" / loaded.name
    lines = _Lines(loaded)
    with lock_run_directory(folder), stop_on_signals() as stop:
        outcome = launch_training(
            loaded,
            folder,
            resume=resume,
            launcher=LocalLauncher(),
            policy_dirs=policy_dirs,
            on_metrics=lines.show,
            stop=stop,
        )
    _leave(outcome, folder)


class _Lines:
    """One line on what it reads, one every `log_every` steps, and one for the last."""

    def __init__(self, config: "TrainConfig") -> None:
        self._config = config
        self._begun = False

    def show(self, row: "Mapping[str, Any]") -> None:
        config, step = self._config, int(row["step"]) + 1
        if not self._begun:
            print(config.cell.data.reading)
            self._begun = True
        if step % config.log_every and step != config.steps:
            return
        left_s = (config.steps - step) * row["step_s"]
        print(
            f"step {step}/{config.steps}  loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}"
            f"  {row['samples'] / row['step_s']:.3g} samples/s" + (f"  {_clock(left_s)} left" if left_s >= 1 else ""),
            flush=True,
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _leave(outcome: "Outcome", folder: Path) -> None:
    from benchbox.store.checkpoints import checkpoints

    found = checkpoints(folder / "checkpoints")
    newest = f"newest checkpoint: {found[-1]}" if found else "no checkpoint"
    if outcome.status == "ok":
        print(f"done; {newest}; metrics: {folder / 'metrics.jsonl'}")
        return
    if outcome.status == "interrupted":
        print(f"stopped; {newest}; continue with --resume", file=sys.stderr)
        raise typer.Exit(_EXIT_STOPPED)
    error = outcome.error or {}
    where = f" (rank {error['rank']}, {error.get('phase') or 'outside a step'})" if error.get("rank") is not None else ""
    print(f"error: {outcome.status}: {error.get('type')}: {error.get('message')}{where}; {newest}", file=sys.stderr)
    print(f"error: what each rank said: {folder / 'launch'}", file=sys.stderr)
    raise typer.Exit(EXIT_USAGE if error.get("type") in {"ConfigurationError", "DataError"} else EXIT_CELL_FAILED)
