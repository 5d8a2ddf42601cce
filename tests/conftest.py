"""What all tests rely on."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell starts background jobs with SIGINT ignored, children inherit that, and what ignores Ctrl-C cannot be tested by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of nohup and SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def compiling() -> Iterator[None]:
    """The witness asks this process whether it has compiled anything, and would find that it has in every later test."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
