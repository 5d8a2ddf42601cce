from pathlib import Path

import pytest

from tests.support.datasets import write_dataset


@pytest.fixture(scope="session")
def dataset_root(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "bars")
