from pathlib import Path

import pytest
from data_helpers import write_dataset

from benchbox.registry.contracts import BatchSpec


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


@pytest.fixture(scope="session")
def dataset_root(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "bars")
