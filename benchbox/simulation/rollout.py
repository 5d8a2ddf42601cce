"""Episodes of a policy in several environments side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import default_collate

from benchbox.errors import NonFiniteError
from benchbox.simulation.observations import check_observation
from benchbox.simulation.processes import SimulationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from benchbox.registry.contracts import Batch
    from benchbox.simulation.live import EpisodeInputs, LiveInputs
    from benchbox.simulation.processes import Advance, EnvironmentProcess


@dataclass(slots=True)
class EpisodeResult:
    """Outcome of an episode.

    `responses` are those that the policy generated, each with the number of steps before it, where it differs from the one
    before. `frames` are (H, W, 3) uint8 images of the first camera, of those episodes that are filmed.
    """

    seed: int
    solved: bool = False
    steps: int = 0
    responses: list[tuple[int, str]] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)


@dataclass(slots=True)
class _RunningEpisode:
    """An episode in an environment."""

    environment: EnvironmentProcess
    inputs: EpisodeInputs
    result: EpisodeResult
    is_filmed: bool


def run_episodes(
    policy: Callable[[Batch], Tensor],
    inputs: LiveInputs,
    environments: Sequence[EnvironmentProcess],
    *,
    seeds: Sequence[int],
    execute: int,
    max_steps: int | None = None,
    filmed: int = 0,
    report: Callable[[EpisodeResult], None] = lambda _: None,
    respond: Callable[[Batch], tuple[Batch, Sequence[str]]] | None = None,
) -> list[EpisodeResult]:
    """Run one episode per seed, and return their results in the order of the seeds.

    All running episodes act in one forward pass; then their environments execute the first `execute` actions of their chunks at
    the same time. An environment that is finished takes the next seed. The course of all episodes is a function of the
    arguments and of the number of environments: rounding in the forward pass depends on the size of the batch.

    Args:
        policy: returns actions (B, N, A) in raw units.
        execute: actions of a chunk that are executed before the policy acts again.
        max_steps: actions after which an episode ends unsolved; None for the limit of the environment.
        filmed: of so many first episodes every frame is observed and kept.
        report: called with every result as it appears.
        respond: called before the policy, returns the batch with responses to act on, and their texts.

    Raises:
        NonFiniteError: the policy predicts an action that is not finite.
        ConfigurationError: the observations of an environment are not like those of the dataset.
        SimulationError: an environment failed, or a state that it returned is not finite.
    """
    results: list[EpisodeResult] = []
    running: list[_RunningEpisode] = []
    waiting = iter(enumerate(seeds))
    free = list(environments)
    every_frame = inputs.spec.history > 1
    while True:
        started = [_start(environment, inputs, number, seed, filmed) for environment, (number, seed) in zip(free, waiting)]  # noqa: B905
        for episode in started:
            _observe(episode, _receive(episode), inputs)
        results += [episode.result for episode in started]
        running += started
        if not running:
            return results
        batch = default_collate([episode.inputs.row() for episode in running])
        with torch.no_grad():
            if respond is not None:
                batch, responses = respond(batch)
                for episode, response in zip(running, responses, strict=True):
                    _note_response(episode.result, response)
            chunks = policy(batch)[:, :execute, : inputs.action_dim].float().cpu().numpy()
        for episode, chunk in zip(running, chunks, strict=True):
            limit = episode.environment.max_steps if max_steps is None else max_steps
            actions = chunk[: limit - episode.result.steps]
            _check_actions(actions, episode.result)
            episode.environment.begin_execution(actions, every_frame=every_frame or episode.is_filmed)
        free, still_running = [], []
        for episode in running:
            progress = _receive(episode)
            _observe(episode, progress, inputs)
            limit = episode.environment.max_steps if max_steps is None else max_steps
            if progress.solved or progress.over or episode.result.steps >= limit:
                free.append(episode.environment)
                report(episode.result)
            else:
                still_running.append(episode)
        running = still_running


def _start(environment: EnvironmentProcess, inputs: LiveInputs, number: int, seed: int, filmed: int) -> _RunningEpisode:
    environment.begin_reset(seed)
    return _RunningEpisode(environment, inputs.begin(environment.task, seed), EpisodeResult(seed), number < filmed)


def _receive(episode: _RunningEpisode) -> Advance:
    """Return the progress of an episode; the error of its environment names the episode."""
    try:
        progress: Advance = episode.environment.receive()
    except SimulationError as error:
        seed, steps = episode.result.seed, episode.result.steps
        raise SimulationError(f"episode of seed {seed}, after step {steps}: {error}") from None
    return progress


def _observe(episode: _RunningEpisode, progress: Advance, inputs: LiveInputs) -> None:
    # A filmed episode has frames that another has not. The noise of actions depends on the number of frames that are kept.
    observations = progress.observations if inputs.spec.history > 1 else progress.observations[-1:]
    episode.result.steps += progress.steps
    for steps, observation in enumerate(observations, start=episode.result.steps - len(observations) + 1):
        check_observation(observation, inputs, f"episode of seed {episode.result.seed}, after step {steps}")
    episode.inputs.append(observations)
    episode.result.solved |= progress.solved
    if episode.is_filmed and inputs.cameras:
        episode.result.frames += [observation.images[inputs.cameras[0]] for observation in progress.observations]


def _note_response(result: EpisodeResult, response: str) -> None:
    if not result.responses or result.responses[-1][1] != response:
        result.responses.append((result.steps, response))


def _check_actions(actions: np.ndarray, result: EpisodeResult) -> None:
    """Raise NonFiniteError where an action of (N, A) is not finite: an environment would execute something else."""
    finite = np.isfinite(actions).all(axis=1)
    if not finite.all():
        raise NonFiniteError(
            f"episode of seed {result.seed}, step {result.steps + int(finite.argmin()) + 1}: the action that the policy "
            "predicts is not finite; evaluate an earlier checkpoint"
        )
