"""Batches that lerobot's policies train on, beside lerobot's own dataset and normalisation, and the actions after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchbox.data import open_dataset
from tests.parity.lerobot import ENVIRONMENT, V30_ENVIRONMENT, run_script

if TYPE_CHECKING:
    from torch import Tensor

    from tests.support.environments import Environment

ROOT = Path(__file__).parents[2]
EPISODES = [20, 30]
INDICES = [0, 1, 10, 20, 25, 49]  # the first two and the first of the next episode; in the middle; the last
WITHOUT_LANGUAGE = {"act": (0, 16), "diffusion": (-1, 15)}  # first action of a chunk, and number of those that are acted
WITH_LANGUAGE = ["pi0", "pi05", "pi0_fast", "smolvla"]
# The diffusion policy needs diffusers, which only the environment of lerobot 0.4 has, where pi0 cannot be built.
POLICIES = {V30_ENVIRONMENT: ["act", "diffusion"], ENVIRONMENT: ["act", *WITH_LANGUAGE]}
CASES = [
    pytest.param(
        (environment, policy),
        id=f"{environment.requirements.stem}-{policy}",
        marks=pytest.mark.skipif(
            not environment.is_built,
            reason=f"no environment {environment.requirements.stem} in build/parity: `make parity` builds it",
        ),
    )
    for environment, policies in POLICIES.items()
    for policy in policies
]
without_language, acting, act = (
    pytest.mark.parametrize("case", [case for case in CASES if case.values[0][1] in names], indirect=True)
    for names in (list(WITHOUT_LANGUAGE), [*WITHOUT_LANGUAGE, "pi0", "pi05", "smolvla"], ["act"])
)


class Case(NamedTuple):
    """A policy, what the script wrote about it, and the dataset that it was trained on."""

    policy: str
    tensors: dict[str, Tensor]
    dataset: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Environment, Path]:
    """Folders that the script has written, by environment; filled by `case`."""
    return {}


@pytest.fixture
def case(request: pytest.FixtureRequest, folders: dict[Environment, Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    environment, policy = request.param
    if environment not in folders:
        folder = tmp_path_factory.mktemp(environment.requirements.stem)
        policies = POLICIES[environment]
        acting = [name for name in policies if name != "pi0_fast"]
        values = {"policies": policies, "acting": acting, "indices": INDICES, "episodes": EPISODES}
        (folder / "request.json").write_text(json.dumps(values))
        run_script("observations", folder, environment, {"PYTHONPATH": str(ROOT)})
        folders[environment] = folder
    folder = folders[environment]
    return Case(policy, load_file(folder / f"{policy}.safetensors"), folder / "dataset")


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_images_are_normalised_as_by_lerobot(case: Case) -> None:
    """ACT and the diffusion policy get them by the statistics of ImageNet, the others from 0 to 1."""
    for camera in ("observation.images.camera0", "observation.images.camera1"):
        ours, theirs = case.tensors[f"adapter.{camera}"], case.tensors[f"lerobot.{camera}"]
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=0, atol=1e-6)
        assert (ours.min() < -1) == (case.policy in WITHOUT_LANGUAGE)


@without_language
def test_states_and_actions_are_of_the_frames_that_lerobot_reads(case: Case) -> None:
    """At the first frame of an episode, the frame before it is repeated, as is the last one past its end."""
    for name in ("observation.state", "action", "action_is_pad"):
        ours, theirs = case.tensors[f"adapter.{name}"], case.tensors[f"lerobot.{name}"]
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=1e-5, atol=1e-5)
    first, _ = WITHOUT_LANGUAGE[case.policy]
    assert case.tensors["adapter.action_is_pad"][:, 0].tolist() == [index + first in (-1, 19) for index in INDICES]


@acting
def test_a_policy_that_has_learnt_its_chunks_acts_those_of_the_current_frame(case: Case) -> None:
    """In raw units, from the frame of the observation on."""
    dataset = open_dataset(case.dataset)
    acted = case.tensors["acted"]
    _, length = WITHOUT_LANGUAGE.get(case.policy, (0, 16))
    assert acted.shape == (len(INDICES), length, 8)
    for actions, index in zip(acted, INDICES, strict=True):
        episode = dataset.episode_of(index)
        recorded = dataset.column("action", index, episode.to_index)
        expected = recorded[np.arange(length).clip(max=len(recorded) - 1)]
        torch.testing.assert_close(actions, torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@acting
def test_the_noise_of_a_sample_determines_its_actions(case: Case) -> None:
    """Wherever else random numbers were drawn, and whatever samples are beside it."""
    torch.testing.assert_close(case.tensors["alone"], case.tensors["beside"], rtol=1e-4, atol=1e-4)


@act
def test_the_loss_of_act_in_evaluation_is_the_distance_alone(case: Case) -> None:
    """There is no latent then, whose divergence is part of the loss in training: lerobot 0.4 itself cannot compute this."""
    torch.testing.assert_close(case.tensors["evaluated"], case.tensors["distances"].abs().mean(), rtol=1e-5, atol=0)
