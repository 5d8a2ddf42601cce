"""Set-up of every test of policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

build_policy("pi05", "tiny", Axes())  # makes `benchbox_policies._layers` importable


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Fix the order of summation, on which equality of losses relies, for all shapes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
