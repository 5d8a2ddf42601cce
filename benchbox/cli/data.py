"""`benchbox data`: recording, inspecting and converting LeRobot datasets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.errors import EXIT_USAGE

if TYPE_CHECKING:
    from benchbox.data.recording import Attempt

data = typer.Typer(name="data", help="Record, inspect and convert LeRobot datasets.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.add_typer(data)


@data.command("record")
def record_dataset(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The dataset.", show_default=False)],
    envs: Annotated[
        list[str],
        typer.Option("--env", metavar="NAME", help="metaworld/reach-v3; repeat for further tasks.", show_default=False),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Solved episodes of each environment.")] = 5,
    cameras: Annotated[str, typer.Option(help="Cameras, separated by commas.")] = "corner,corner2,topview,gripperPOV",
    size: Annotated[int, typer.Option(min=16, help="Height and width of the images in pixels; even.")] = 64,
    every: Annotated[
        int, typer.Option(min=1, help="Repeat an action for this many control steps of 1/80 s: 80/EVERY frames/s.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the goals.")] = 0,
) -> None:
    """Record scripted experts in the Meta-World simulator (extra `sim`). Episodes that do not solve the task are discarded.

    Repeat the command to finish a recording that was interrupted.
    """
    from benchbox.data.recording import record

    rates = record(
        out,
        envs=envs,
        episodes=episodes,
        cameras=[name for name in cameras.split(",") if name],
        size=size,
        every=every,
        seed=seed,
        report=lambda attempt: _print_attempt(attempt, episodes),
    )
    for rate in rates:
        print(f"{rate.env}: {rate}")
    print(f"recorded {out}")


@data.command("inspect")
def inspect_dataset(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset.", show_default=False)],
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FILE", help="Ranges of frames that training would draw.", show_default=False),
    ] = None,
) -> None:
    """Print a summary of a dataset and its problems. Exits with 2 when there are any."""
    from benchbox.data import open_dataset
    from benchbox.data.inspection import inspect

    inspection = inspect(open_dataset(root), keep)
    width = max(map(len, inspection.facts))
    for label, text in inspection.facts.items():
        print(f"{label:<{width}}  {text}")
    print(f"\n{len(inspection.problems) or 'no'} problem{'' if len(inspection.problems) == 1 else 's'}")
    for problem in inspection.problems:
        print(f"  {problem}")
    if inspection.problems:
        raise typer.Exit(EXIT_USAGE)


@data.command("convert")
def convert_dataset(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="NEW_DIR", help="The new dataset; must not exist.", show_default=False)],
    version: Annotated[str, typer.Option("--to", metavar="VERSION", help="v3.0 or v2.1.")] = "v3.0",
) -> None:
    """Write a LeRobot dataset in another version. Videos are copied without encoding them again where that is possible."""
    from rich.console import Console
    from rich.progress import Progress

    from benchbox.data.convert import convert

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("episodes")
        conversion = convert(source, target, version, lambda done, total: progress.update(task, completed=done, total=total))
    print(f"wrote {target} as {version}: {conversion.copied} videos of episodes copied, {conversion.encoded} encoded again")
    if conversion.left_out:
        print(f"left out: {', '.join(conversion.left_out)}, which {version} does not have")


def _print_attempt(attempt: "Attempt", episodes: int) -> None:
    outcome = f"{'solved' if attempt.solved else 'not solved, discarded'} in {attempt.frames} frames"
    origin = " before the interruption" if attempt.stored else ""
    so_far = f"{attempt.saved} of {episodes} episodes, {attempt.success_rate}"
    print(f"{attempt.env}: {outcome}{origin}; {so_far}", flush=True)
