"""`benchbox data`: recording, inspecting, converting and measuring LeRobot datasets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchbox.cli.options import PolicyDirOption
from benchbox.errors import EXIT_USAGE, ConfigurationError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.registry.orders import ORDERS

if TYPE_CHECKING:
    from benchbox.data.loading.bench import LoadingReport
    from benchbox.data.writing.recording import Attempt

MAX_WORKERS = 64
MAX_DECODED_PER_USED = 1.2  # above it the length of a block does not fit the videos

data = typer.Typer(help="Record, inspect, convert and measure LeRobot datasets.", no_args_is_help=True)


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
    """Record scripted experts of Meta-World (extra `sim`). Episodes that do not solve the task are discarded.

    Repeat the command to finish a recording that was interrupted.
    """
    from benchbox.data.writing.recording import record

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
    from benchbox.analysis.quantities import counted
    from benchbox.data import open_dataset
    from benchbox.data.inspection import inspect

    inspection = inspect(open_dataset(root), keep)
    width = max(map(len, inspection.facts))
    for label, text in inspection.facts.items():
        print(f"{label:<{width}}  {text}")
    print(f"\n{counted(len(inspection.problems), 'problem') if inspection.problems else 'no problems'}")
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

    from benchbox.data.writing.convert import convert

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("episodes")
        conversion = convert(source, target, version, lambda done, total: progress.update(task, completed=done, total=total))
    print(f"wrote {target} as {version}: {conversion.copied} videos of episodes copied, {conversion.encoded} encoded again")
    if conversion.left_out:
        print(f"left out: {', '.join(conversion.left_out)}, which {version} does not have")


@data.command("bench")
def bench_dataset(
    root: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset.", show_default=False)],
    policy_dirs: PolicyDirOption,
    orders: Annotated[
        list[str], typer.Option("--order", metavar="NAME", help="frame_shuffle, episode_shuffle, sequential; may be repeated.")
    ] = ["frame_shuffle", "episode_shuffle"],  # noqa: B006  # typer copies it
    workers: Annotated[str, typer.Option(help="Numbers of loader processes, separated by commas.")] = "0,1,2",
    policy: Annotated[str, typer.Option(help="The policy whose samples are made.")] = "pi05",
    size: Annotated[str, typer.Option(help="A preset of the policy.")] = "tiny",
    batch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 8,
    block: Annotated[int, typer.Option(min=1, help="Frames of an episode that episode_shuffle reads together.")] = 16,
    buffer: Annotated[int, typer.Option(min=1, help="Samples among which episode_shuffle mixes.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a measurement.")] = 3.0,
) -> None:
    """Measure how fast a dataset is loaded.

    Shows samples/s by order and workers and where the time goes, and recommends a number of workers.
    """
    import torch
    from rich.console import Console

    from benchbox.data import open_dataset
    from benchbox.data.loading.bench import measure_loading
    from benchbox.registry.attention import default_attention
    from benchbox.registry.contracts import Axes
    from benchbox.registry.policies import policy_entry
    from benchbox.session.construction import construct_policy
    from benchbox.spec.cell import Cell, DataSpec

    counts = _parse_counts(workers)
    for order in orders:
        if order not in ORDERS:
            raise ConfigurationError(Problem("--order", f"unknown order {order!r}", did_you_mean(order, ORDERS)))
    attention: Any = default_attention(policy_entry(policy, policy_dirs))
    axes = Axes(cams=max(1, len(open_dataset(root).cameras)), attention=attention)
    cell = Cell(policy=policy, size=size, backend="single", world_size=1, batch=batch)
    spec = construct_policy(cell, axes, torch.device("cpu"), policy_dirs).batch_spec()
    with Console(stderr=True).status("measuring") as status:
        loading = measure_loading(
            DataSpec(kind="lerobot", path=str(root), block=block, buffer=buffer),
            spec,
            orders=orders,
            workers=counts,
            batch=batch,
            seconds=seconds,
            on_progress=status.update,
        )
    _print_loading(loading, block)


def _parse_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) <= MAX_WORKERS for part in parts):
        raise ConfigurationError(
            Problem("--workers", f"{text!r} is not a list of numbers from 0 to {MAX_WORKERS}", "write 0,1,2")
        )
    return sorted({int(part) for part in parts})


def _print_loading(loading: "LoadingReport", block: int) -> None:
    from benchbox.data.loading.bench import recommend_workers

    print(f"{'order':<16} {'workers':>7} {'samples/s':>10}")
    for rate in loading.rates:
        print(f"{rate.order:<16} {rate.workers:>7} {rate.samples_per_s:>10.0f}")
    for cost in loading.costs:
        stages = ", ".join(f"{stage} {seconds * 1e6:.0f}" for stage, seconds in cost.seconds.items())
        print(f"\n{cost.order}: microseconds of a sample in one process: {stages}")
        if cost.decoded_per_used is not None:
            print(f"{cost.order}: {cost.decoded_per_used:.2f} frames decoded per frame used")
        count = recommend_workers([rate for rate in loading.rates if rate.order == cost.order])
        print(f"{cost.order}: recommended data: {{workers: {count}}}")
        interval = loading.key_frame_interval
        if cost.order == "episode_shuffle" and (cost.decoded_per_used or 0) > MAX_DECODED_PER_USED and interval:
            hint = f"a multiple of {interval} decodes fewer frames" if block % interval else "a larger one decodes fewer frames"
            print(f"{cost.order}: the videos have a key frame every {interval} frames, and a block has {block}: {hint}")


def _print_attempt(attempt: "Attempt", episodes: int) -> None:
    outcome = f"{'solved' if attempt.solved else 'not solved, discarded'} in {attempt.frames} frames"
    origin = " before the interruption" if attempt.stored else ""
    so_far = f"{attempt.saved} of {episodes} episodes, {attempt.success_rate}"
    print(f"{attempt.env}: {outcome}{origin}; {so_far}", flush=True)
