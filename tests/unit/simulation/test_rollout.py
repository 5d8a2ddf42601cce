"""Episodes of a policy in environments, which run in processes of their own."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pytest
import torch

from benchbox.data import open_dataset
from benchbox.data.sample import sample_path
from benchbox.data.samples.windows import DatasetSamples
from benchbox.errors import EXIT_CELL_FAILED, ConfigurationError, NonFiniteError
from benchbox.simulation import processes
from benchbox.simulation.environment import EnvironmentFrame
from benchbox.simulation.live import LiveInputs, open_inputs
from benchbox.simulation.observations import unknown_task
from benchbox.simulation.processes import EnvironmentProcess, SimulationError
from benchbox.simulation.rollout import EpisodeResult, run_episodes
from benchbox.simulation.videos import write_video
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_robot
from tests.support.policy_batches import build
from tests.support.toy_environment import (
    MAX_STEPS,
    DivergingEnvironment,
    FailingEnvironment,
    GymEnvironment,
    ToyEnvironment,
    UnequalEnvironment,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Policy

HORIZON, EXECUTE = 10, 4


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = build("pi05", "tiny_flow")
    policy.load_statistics([open_dataset(sample_path()).statistics])
    return policy


@pytest.fixture(scope="module")
def inputs(policy: Policy) -> LiveInputs:
    return open_inputs(DataSpec(), policy.batch_spec(), seed=0)


def rollout(
    inputs: LiveInputs,
    act: Callable[[Batch], Tensor],
    *,
    count: int = 2,
    seeds: Sequence[int] = range(4),
    factory: type = ToyEnvironment,
    max_steps: int | None = None,
    filmed: int | None = None,
) -> list[EpisodeResult]:
    with ExitStack() as stack:
        environments = [
            stack.enter_context(closing(EnvironmentProcess(factory, inputs.cameras, inputs.image_size, inputs.dataset.fps)))
            for _ in range(count)
        ]
        return run_episodes(
            act,
            inputs,
            environments,
            seeds=seeds,
            execute=EXECUTE,
            max_steps=max_steps,
            filmed=len(seeds) if filmed is None else filmed,
        )


def count_up(batch: Batch) -> Tensor:
    """Return chunks whose k-th action is k in every dimension."""
    return torch.arange(float(HORIZON))[None, :, None].expand(len(batch["state"]), -1, 32)


def states(result: EpisodeResult) -> list[float]:
    """First number of the state in every frame of a filmed episode."""
    return [float(frame.reshape(-1)[:4].view("float32")[0]) for frame in result.frames]


def test_results_are_in_the_order_of_their_seeds_with_any_number_of_environments(inputs: LiveInputs) -> None:
    seeds = (9, 0, 5, 1, 11)
    outcomes = {
        count: [(result.seed, result.solved, result.steps) for result in rollout(inputs, count_up, count=count, seeds=seeds)]
        for count in (1, 3)
    }
    assert outcomes[1] == [(9, True, 12), (0, True, 3), (5, True, 8), (1, True, 4), (11, False, MAX_STEPS)]
    assert outcomes[3] == outcomes[1]


def test_the_first_actions_of_a_chunk_are_executed_before_the_policy_acts_again(inputs: LiveInputs) -> None:
    (result,) = rollout(inputs, count_up, count=1, seeds=[5])
    assert states(result) == pytest.approx([0.5 + total for total in (0, 0, 1, 3, 6, 6, 7, 9, 12)])


def test_running_episodes_act_in_one_batch(inputs: LiveInputs) -> None:
    sizes = []

    def act(batch: Batch) -> Tensor:
        sizes.append(len(batch["state"]))
        return count_up(batch)

    rollout(inputs, act, count=3, seeds=[0, 5, 5, 0])
    assert sizes == [3, 3]  # the first is solved in its first chunk, and the fourth takes its environment


def test_an_episode_ends_unsolved_at_the_limit(inputs: LiveInputs) -> None:
    (result,) = rollout(inputs, count_up, count=1, seeds=[5], max_steps=6)
    assert (result.solved, result.steps) == (False, 6)


def test_the_same_seeds_give_the_same_actions_and_another_seed_of_noise_others(policy: Policy, inputs: LiveInputs) -> None:
    def courses(seed: int) -> list[list[float]]:
        seeded = LiveInputs(dataset=inputs.dataset, spec=inputs.spec, tokenizer=None, seed=seed)
        return [states(result) for result in rollout(seeded, policy.select_actions, seeds=range(3))]

    first = courses(0)
    assert courses(0) == first
    assert courses(1) != first


def test_the_inputs_of_a_frame_are_those_of_the_same_frame_in_training() -> None:
    spec = build("pi05_mem", "tiny", cams=2).batch_spec()  # which also reads the history
    inputs = open_inputs(DataSpec(), spec, seed=3)
    dataset, frame = inputs.dataset, 5
    live = inputs.begin(dataset.task(0), number=0)
    for index in range(frame + 1):
        images = {camera: dataset.pixels(camera, index) for camera in inputs.cameras}
        live.append([EnvironmentFrame(dataset.column("observation.state", index, index + 1)[0], images)])
    expected = DatasetSamples(dataset, spec, 3).sample(0, frame)
    row = live.row()
    assert {"images", "state", "noise", "prompt_tokens"} <= row.keys()
    assert "action" not in row
    texts = ("response_tokens", "response_mask")  # nobody writes a response while the policy acts
    assert [name for name in row if name not in texts and not torch.equal(row[name], expected[name])] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": np.zeros(3)}, r"the state that the environment returns has shape \(3,\), and .* has 4 numbers; name"),
        ({"state": np.zeros((1, 4))}, r"the state that the environment returns has shape \(1, 4\), and .* has 4 numbers; name"),
        ({"images": {"left": None}}, "the environment returns images of left, and the policy was trained with corner; return"),
        ({"images": {}}, "the environment returns images of no camera, and the policy was trained with corner; return"),
        (
            {"images": {"corner": np.zeros((64, 48, 3), np.uint8)}},
            r"the image of camera corner has shape \(64, 48, 3\) and dtype uint8; return .*: \(64, 64, 3\), uint8",
        ),
        ({"images": {"corner": np.zeros((64, 64, 3))}}, "and dtype float64; return images as they are in"),
    ],
)
def test_observations_that_are_not_like_the_datasets_are_refused(
    inputs: LiveInputs, changes: dict[str, Any], message: str
) -> None:
    """Padding, normalisation and resizing would make inputs of them on which no policy was trained."""

    class Changed(ToyEnvironment):
        def observe(self) -> EnvironmentFrame:
            return super().observe()._replace(**changes)

    with pytest.raises(ConfigurationError, match=f"^--env: .*{message}"):
        rollout(inputs, count_up, count=1, seeds=[0], factory=Changed)


def test_each_camera_has_the_size_that_it_has_in_the_dataset(tmp_path: Path) -> None:
    root = write_robot(tmp_path / "a", cameras={"top": (16, 16), "wrist": (16, 20)}, state=4, action=4)
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(root)),))
    inputs = open_inputs(data, build("pi05", "tiny_flow", cams=2).batch_spec(), seed=0)
    (result,) = rollout(inputs, count_up, count=1, seeds=[0], factory=UnequalEnvironment)
    assert result.solved
    with pytest.raises(ConfigurationError, match=r"camera wrist has shape \(16, 16, 3\) .*: \(16, 20, 3\), uint8"):
        rollout(inputs, count_up, count=1, seeds=[0])


def test_a_task_that_the_dataset_lacks_is_stated(inputs: LiveInputs) -> None:
    assert unknown_task("door open", inputs) is None
    assert unknown_task("door_open\n", inputs) is None, "prompts have the same words"
    line = f"the task 'add' of the environment is none of the 2 in {inputs.dataset.root}: 'reach', 'door open'"
    assert unknown_task("add", inputs) == line


def test_an_environment_that_fails_is_reported_in_one_line(inputs: LiveInputs, capfd: pytest.CaptureFixture[str]) -> None:
    """Also if another one fails later, when nobody waits for its answer any more."""

    class Late(FailingEnvironment):
        def step(self, action: np.ndarray) -> tuple[bool, bool]:
            time.sleep(0.2 * (self._seed == 4))
            return super().step(action)

    line = "episode of seed 3, after step 0: the environment failed: ValueError: no action like 4 numbers"
    with pytest.raises(SimulationError, match=f"^{line}$") as caught:
        rollout(inputs, count_up, factory=Late, seeds=[3, 4])
    assert caught.value.exit_code == EXIT_CELL_FAILED, "it is no bug of benchbox"
    assert capfd.readouterr().err == ""


def test_an_environment_that_does_not_answer_ends_the_evaluation(inputs: LiveInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(ToyEnvironment):
        def step(self, action: np.ndarray) -> tuple[bool, bool]:
            time.sleep(600)
            return super().step(action)

    def act(batch: Batch) -> Tensor:
        monkeypatch.setattr(processes, "ANSWER_LIMIT_S", 0.5)  # not before: a busy machine may start a process in more
        return count_up(batch)

    with pytest.raises(
        SimulationError, match=r"^episode of seed 3, after step 0: the environment has not answered for 0\.5 s$"
    ):
        rollout(inputs, act, factory=Hanging, count=1, seeds=[3])


def test_an_environment_may_return_the_types_of_gymnasium(inputs: LiveInputs) -> None:
    """The record of an evaluation is written as JSON, which has no types of NumPy."""
    batches = []

    def act(batch: Batch) -> Tensor:
        batches.append(batch)
        return count_up(batch)

    (plain,), (result,) = (rollout(inputs, act, count=1, seeds=[5], factory=kind) for kind in (ToyEnvironment, GymEnvironment))
    assert json.dumps([result.solved, result.steps]) == json.dumps([plain.solved, plain.steps]) == "[true, 8]"
    assert [batch["state"].tolist() for batch in batches[:2]] == [batch["state"].tolist() for batch in batches[2:]]
    with closing(EnvironmentProcess(GymEnvironment, inputs.cameras, inputs.image_size, 10.0)) as environment:
        assert type(environment.max_steps) is int


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"task": None}, "TypeError: its task is None, and not a text"),
        ({"max_steps": None}, "TypeError: int"),
        ({"max_steps": -3}, "ValueError: its max_steps is -3, and not a number of steps"),
        ({"max_steps": 2.5}, "ValueError: its max_steps is 2.5, and not a number of steps"),
        ({"step": lambda *_: (0.3, False)}, "ValueError: the step returns 0.3 as solved, which is neither true nor false"),
        (
            {"step": lambda *_: (False, float("nan"))},
            "ValueError: the step returns nan as over, which is neither true nor false",
        ),
        ({"observe": lambda _: (np.zeros(4), {})}, "AttributeError: 'tuple' object has no attribute 'state'"),
        ({"observe": lambda _: EnvironmentFrame(np.array(["up"] * 4), {})}, "ValueError: could not convert string to float"),
        ({"observe": lambda _: EnvironmentFrame(np.zeros(4), None)}, "TypeError: the images of its observation are NoneType"),  # type: ignore[arg-type]
    ],
)
def test_an_environment_whose_members_are_of_another_type_fails_in_one_line(
    inputs: LiveInputs, members: dict[str, Any], message: str
) -> None:
    with pytest.raises(SimulationError, match=f"the environment failed: {re.escape(message)}"):
        rollout(inputs, count_up, count=1, seeds=[0], factory=type("Changed", (ToyEnvironment,), members))


@pytest.mark.parametrize("error", [BrokenPipeError("physics server"), EOFError("physics server")])
def test_an_environment_that_loses_a_process_of_its_own_is_not_taken_for_one_that_ended(
    inputs: LiveInputs, error: Exception
) -> None:
    """The pipe to its simulator is broken, and not the one to the evaluation."""

    def step(*_: Any) -> None:
        raise error

    with pytest.raises(SimulationError, match=f"the environment failed: {type(error).__name__}: physics server$"):
        rollout(inputs, count_up, count=1, seeds=[0], factory=type("Lost", (ToyEnvironment,), {"step": step}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_action_that_is_not_finite_ends_the_evaluation_with_seed_and_step(inputs: LiveInputs, value: float) -> None:
    """Meta-World clips an infinite one, and executes it."""

    chunks = []

    def act(batch: Batch) -> Tensor:
        chunks.append(count_up(batch).clone())
        if len(chunks) == 2:
            chunks[-1][:, 2, 1] = value
        return chunks[-1]

    with pytest.raises(NonFiniteError, match=r"^episode of seed 9, step 7: the action .* is not finite; .*$") as raised:
        rollout(inputs, act, count=1, seeds=[9])
    assert raised.value.exit_code == EXIT_CELL_FAILED


def test_actions_that_are_not_executed_may_be_anything(inputs: LiveInputs) -> None:
    """Dimensions that the dataset lacks, and what follows in the chunk."""

    def act(batch: Batch) -> Tensor:
        actions = torch.full((len(batch["state"]), HORIZON, 32), torch.nan)
        actions[:, :EXECUTE, :4] = 0
        return actions

    (result,) = rollout(inputs, act, count=1, seeds=[5])
    assert result.solved


@pytest.mark.parametrize("filmed", [0, 1])
def test_a_state_that_is_not_finite_is_the_error_of_the_environment(inputs: LiveInputs, filmed: int) -> None:
    with pytest.raises(SimulationError, match=r"^episode of seed 7, after step 4: the state that the environment returns"):
        rollout(inputs, count_up, count=1, seeds=[7], factory=DivergingEnvironment, filmed=filmed)


def test_the_frame_that_is_not_finite_is_named_where_the_policy_has_a_memory() -> None:
    inputs = open_inputs(DataSpec(), build("pi05_mem", "tiny").batch_spec(), seed=0)
    with pytest.raises(SimulationError, match=r"^episode of seed 7, after step 2: the state"):
        rollout(inputs, count_up, count=1, seeds=[7], factory=DivergingEnvironment)


def test_frames_with_odd_sides_are_filmed(tmp_path):
    """H.264 has even ones."""
    write_video(tmp_path / "v.mp4", [np.zeros((65, 85, 3), np.uint8)] * 3, 10.0)
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert [(frame.height, frame.width) for frame in container.decode(video=0)] == [(66, 86)] * 3


def test_an_episode_takes_the_same_actions_whether_it_is_filmed_or_not(policy: Policy, inputs: LiveInputs) -> None:
    chosen: dict[int, list[Tensor]] = {}
    for filmed in (0, 2):

        def act(batch: Batch, actions: list[Tensor] = chosen.setdefault(filmed, [])) -> Tensor:  # noqa: B008
            actions.append(policy.select_actions(batch))
            return actions[-1]

        rollout(inputs, act, count=1, seeds=(9, 10), filmed=filmed)
    assert len(chosen[0]) == len(chosen[2]) == 6, "three chunks in each of two episodes"
    assert all(torch.equal(*pair) for pair in zip(chosen[0], chosen[2], strict=True))


def test_a_policy_with_a_memory_sees_every_frame_of_an_episode_that_is_not_filmed() -> None:
    inputs = open_inputs(DataSpec(), build("pi05_mem", "tiny").batch_spec(), seed=0)
    seen: dict[int, list[Tensor]] = {}
    for filmed in (0, 1):

        def act(batch: Batch, images: list[Tensor] = seen.setdefault(filmed, [])) -> Tensor:  # noqa: B008
            images.append(batch["images"])
            return count_up(batch)

        rollout(inputs, act, count=1, seeds=[5], filmed=filmed)
    assert len(seen[0]) == len(seen[1]) == 2, "chunks"
    assert all(torch.equal(*pair) for pair in zip(seen[0], seen[1], strict=True))


@pytest.mark.parametrize(("name", "shape"), [("observation.image", [32, 48, 3]), ("observation.images.top", [3, 32, 48])])
def test_images_are_asked_for_in_the_size_of_the_dataset(inputs: LiveInputs, name: str, shape: list[int]) -> None:
    """Whatever the order of its dimensions, and of a single camera under the name that has no part of its own."""
    dataset = SimpleNamespace(cameras=(name.removeprefix("observation.images."),), features={name: {"shape": shape}})
    live = LiveInputs(dataset=dataset, spec=inputs.spec, tokenizer=None, seed=0)  # type: ignore[arg-type]
    assert live.image_size == (32, 48)
