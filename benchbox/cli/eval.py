"""`benchbox eval`: the success rate of a checkpoint in simulated environments."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchbox.cli.export import ExportDtype
from benchbox.cli.options import PolicyDirOption

if TYPE_CHECKING:
    from benchbox.simulation.rollout import EpisodeResult


def evaluate_checkpoint(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A folder step-<n>, or that of a training.", show_default=False)
    ],
    env: Annotated[
        str, typer.Option("--env", metavar="NAME", help="metaworld/reach-v3, or module:factory.", show_default=False)
    ],
    policy_dirs: PolicyDirOption,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes, each with a seed of its own.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; the next ones follow.")] = 0,
    execute: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Execute the first N actions of a chunk.", show_default="the whole chunk"),
    ] = None,
    environments: Annotated[int, typer.Option(min=1, help="Environments side by side, each in a process of its own.")] = 2,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Actions after which an episode ends.", show_default="the environment's limit"),
    ] = None,
    videos: Annotated[int, typer.Option(min=0, help="Film so many first episodes.")] = 3,
    averages: Annotated[bool, typer.Option("--ema", help="Act with the averages of the weights, in their place.")] = False,
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Dtype of the weights.")] = ExportDtype.float32,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Output folder.",
            show_default="evaluation-<env>[-averages][-<dtype>]-step-<n> beside it",
        ),
    ] = None,
) -> None:
    """Measure how often the policy of a checkpoint succeeds.

    It acts in an environment; its success rate has a 95% Wilson interval. The output folder gets evaluation.json,
    evaluation.html, evaluation.md, videos and stills. The same command gives the same episodes on the same machine.
    """
    from benchbox.cli.outputs import check_folder
    from benchbox.report.evaluation import write_evaluation
    from benchbox.simulation.evaluate import EvaluationSettings, evaluate
    from benchbox.store.checkpoints import find_checkpoint

    settings = EvaluationSettings(
        env=env,
        episodes=episodes,
        seed=seed,
        execute=execute,
        environments=environments,
        max_steps=max_steps,
        videos=videos,
        averages=averages,
        dtype=dtype.value,
    )
    checkpoint = find_checkpoint(checkpoint)
    kind = ("-averages" if averages else "") + ("" if dtype is ExportDtype.float32 else f"-{dtype.value}")
    folder = out or checkpoint.parent / f"evaluation-{env.replace('/', '-').replace(':', '-')}{kind}-{checkpoint.name}"
    check_folder(folder)
    record = evaluate(checkpoint, settings, folder, policy_dirs, _print_episode, _print_warning)
    rate = record["success_rate"]
    print(
        f"{env}: solved {rate['solved']} of {rate['episodes']} episodes, {rate['rate']:.0%}"
        f" (95% interval {rate['low']:.0%} to {rate['high']:.0%})"
    )
    print(write_evaluation([folder], folder))


def _print_episode(result: "EpisodeResult") -> None:
    print(f"seed {result.seed}: {'solved' if result.solved else 'not solved'} after {result.steps} actions", flush=True)


def _print_warning(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
