"""Tests that need an NVIDIA GPU. `make gpu` runs them (docs/gpu.md).

With BENCHBOX_GPU_REHEARSAL=1 they run on a CPU instead, except those that use the fixture `cuda`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable

HERE = Path(__file__).parent
NO_GPU = "needs an NVIDIA GPU: make gpu"
SHARED_GPU = "needs the GPU for itself, and other workers of pytest-xdist may use it: make gpu"
ANYWHERE = {"test_battery.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rehearsal = os.environ.get("BENCHBOX_GPU_REHEARSAL") == "1"
    for item in items:  # of all folders
        if HERE not in item.path.parents or item.path.name in ANYWHERE:
            continue
        if torch.cuda.is_available():
            if "PYTEST_XDIST_WORKER" in os.environ:
                item.add_marker(pytest.mark.skip(reason=SHARED_GPU))
        elif not rehearsal or "cuda" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The device of a test that a CPU cannot rehearse."""
    return torch.device("cuda", 0)
