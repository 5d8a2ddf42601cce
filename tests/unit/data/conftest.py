from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.registry.contracts import BatchSpec
from tests.support.datasets import write_dataset


@pytest.fixture
def spec() -> BatchSpec:
    return BatchSpec(
        cameras=2,
        image_size=(16, 20),
        state_dim=8,
        action_dim=6,
        horizon=5,
        history=3,
        prompt_tokens=96,
        text_vocab=300,
        state_in_prompt=True,
        response_tokens=4,
        fast_tokens=12,
        fast_vocab=256,
        uniforms=2,
    )


@pytest.fixture
def bare_spec(spec) -> BatchSpec:
    """Nothing that a policy need not ask for."""
    return replace(spec, response_tokens=0, fast_tokens=0)


@pytest.fixture
def full_spec(spec) -> BatchSpec:
    """Everything that a policy can ask for."""
    return replace(
        spec,
        memory_tokens=6,
        metadata=(3, 7),
        subgoal=True,
        future=4,
        returns=True,
        field_of_view=True,
        noise_draws=2,
        latent_shape=(3, 2),
        cues={"memory": "Updated Memory: ", "action": "Action: "},
    )


@pytest.fixture(scope="session")
def dataset_root(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "bars")
