"""Evaluation of a checkpoint in closed loop: its record, videos and stills."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn

from benchbox.analysis.proportion import wilson_interval
from benchbox.data.samples.digest import check_unchanged, digest_state_statistics
from benchbox.errors import BenchboxError, ConfigurationError, Problem
from benchbox.measure.environment import environment as describe_machine
from benchbox.registry.contracts import Axes
from benchbox.registry.versions import installed_version
from benchbox.session.construction import construct_policy
from benchbox.simulation.environment import find_factory
from benchbox.simulation.live import open_inputs
from benchbox.simulation.observations import unknown_task
from benchbox.simulation.processes import EnvironmentProcess
from benchbox.simulation.responses import Responses
from benchbox.simulation.rollout import run_episodes
from benchbox.simulation.videos import write_stills, write_video
from benchbox.spec.cell import Cell
from benchbox.store.checkpoints import find_checkpoint, read_manifest
from benchbox.store.files import write_json
from benchbox.trainer.checkpoint import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Batch, RespondingPolicy
    from benchbox.simulation.rollout import EpisodeResult

SCHEMA_VERSION = 1
RECORD, PAGES = "evaluation.json", ("evaluation.html", "evaluation.md")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Settings of an evaluation. None of `execute` is the whole chunk, of `max_steps` the limit of the environment."""

    env: str
    episodes: int = 50
    seed: int = 0  # of the first episode; the next ones follow
    execute: int | None = None
    environments: int = 2
    max_steps: int | None = None
    videos: int = 3
    averages: bool = False  # of the weights, in their place
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights, and what is computed with them


def evaluate(
    checkpoint: Path,
    settings: EvaluationSettings,
    out: Path,
    policy_dirs: Sequence[Path] = (),
    report: Callable[[EpisodeResult], None] = lambda _: None,
    warn: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Run the episodes, and write `evaluation.json`, `videos/` and `stills/` into `out`; return the record.

    An error in an episode ends the evaluation. The record then has the episodes that had ended before it, the error, and no
    success rate: of those that have ended, too many were solved, since that ends an episode.

    Args:
        report: called with the result of every episode as it appears.
        warn: called with a line on how acting differs from the training of the policy, before the first episode.

    Raises:
        ConfigurationError: there is no such environment, its observations are not like those of the dataset, the settings do
            not fit the policy, or the statistics by which the state is written into its prompt have changed.
        UnsupportedError: the policy does not act, or was trained on other data than one LeRobot dataset.
        DataError: the checkpoint or its dataset is missing or damaged.
        RecordError: the manifest of the checkpoint is damaged.
        NonFiniteError: the policy predicts an action that is not finite.
        SimulationError: an environment failed.
    """
    checkpoint = find_checkpoint(checkpoint)
    manifest = read_manifest(checkpoint)
    cell, factory = Cell.from_dict(manifest.cell), find_factory(settings.env)
    axes = Axes(cams=cell.cams, attention=cell.attention, mode=cell.data.mode)
    spec = construct_policy(cell, axes, torch.device("cpu"), policy_dirs).batch_spec()
    execute = spec.acting_horizon if settings.execute is None else settings.execute
    if not 1 <= execute <= spec.acting_horizon:
        raise ConfigurationError(Problem("--execute", f"{execute} actions of a chunk of {spec.acting_horizon}"))
    inputs = open_inputs(cell.data, spec, cell.seed)
    responses = Responses(inputs)
    if responses.warning is not None:
        warn(responses.warning)
    if spec.state_in_prompt:  # what normalises otherwise is in the checkpoint
        digest = digest_state_statistics(str(inputs.dataset.root), inputs.dataset.statistics)
        hint = "evaluate with those of the training, by which the policy reads the state in its prompt"
        check_unchanged(checkpoint, manifest.data, [digest], hint)
    count = min(settings.environments, settings.episodes)
    with ExitStack() as stack:
        environments = [  # forked before the first forward pass starts threads
            stack.enter_context(closing(EnvironmentProcess(factory, inputs.cameras, inputs.image_size, inputs.dataset.fps)))
            for _ in range(count)
        ]
        task, limit = environments[0].task, environments[0].max_steps
        task_warning = unknown_task(task, inputs)
        if task_warning is not None:
            warn(task_warning)
        policy = load_policy(checkpoint, policy_dirs, averages=settings.averages)
        assert isinstance(policy, nn.Module)
        policy.to(_DTYPES[settings.dtype])

        def act(batch: Batch) -> Tensor:
            actions: Tensor = policy.select_actions(batch)
            return actions

        def respond(batch: Batch) -> tuple[Batch, list[str]]:
            batch = cast("RespondingPolicy", policy).generate_response(batch, responses.end)
            return batch, responses.texts(batch)

        finished: list[EpisodeResult] = []

        def note(result: EpisodeResult) -> None:
            finished.append(result)
            report(result)

        failure: BenchboxError | None = None
        try:
            run_episodes(
                act,
                inputs,
                environments,
                seeds=range(settings.seed, settings.seed + settings.episodes),
                execute=execute,
                max_steps=settings.max_steps,
                filmed=settings.videos,
                report=note,
                respond=respond if responses.are_generated else None,
            )
        except BenchboxError as error:
            if not finished:
                raise
            failure = error
    results = sorted(finished, key=lambda result: result.seed)
    record = {
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoint": {"name": checkpoint.resolve().name, "steps": manifest.steps, "cell": cell.to_dict()},
        "env": settings.env,
        "task": task,
        "task_in_dataset": task_warning is None,
        "cameras": list(inputs.cameras),
        "frames_per_s": inputs.dataset.fps,
        "horizon": spec.acting_horizon,
        "execute": execute,
        "max_steps": limit if settings.max_steps is None else settings.max_steps,
        "environments": count,
        "weights": "averages" if settings.averages else "trained",
        "dtype": settings.dtype,
        "device": "cpu",
        "success_rate": None if failure else _success_rate(results),
        "error": None if failure is None else {"type": type(failure).__name__, "message": str(failure)},
        "episodes": [_episode(result, out, inputs.dataset.fps) for result in results],
        "versions": {name: installed_version(name) for name in ("metaworld", "mujoco", "gymnasium")},
        "environment": describe_machine(),
        "torch_threads": torch.get_num_threads(),
    }
    write_json(out / RECORD, record)
    if failure is not None:
        for page in PAGES:  # of an earlier evaluation
            (out / page).unlink(missing_ok=True)
        raise failure
    return record


def _success_rate(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    solved = sum(result.solved for result in results)
    low, high = wilson_interval(solved, len(results))
    return {"solved": solved, "episodes": len(results), "rate": solved / len(results), "low": low, "high": high}


def _episode(result: EpisodeResult, out: Path, fps: float) -> dict[str, Any]:
    """Write the video and the stills of an episode that was filmed, and return its part of the record."""
    name = f"episode-{result.seed:04d}"
    stills: list[str] = []
    if result.frames:
        write_video(out / "videos" / f"{name}.mp4", result.frames, fps)
        stills = write_stills(out / "stills", name, result.frames)
    return {
        "seed": result.seed,
        "solved": result.solved,
        "steps": result.steps,
        "responses": [{"step": step, "text": text} for step, text in result.responses],
        "video": f"videos/{name}.mp4" if result.frames else None,
        "stills": [f"stills/{still}" for still in stills],
    }
