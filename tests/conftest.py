"""Fixtures of all tests."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.fork_servers import SharedForkServers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A shell starts background jobs with SIGINT ignored, children inherit that, and what ignores Ctrl-C cannot be tested by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of nohup and SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


_servers: list[SharedForkServers] = []


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the shared fork servers if a test needs ranks."""
    if not session.config.option.collectonly and any(item.get_closest_marker("ranks") for item in session.items):
        _servers.append(SharedForkServers())


def pytest_sessionfinish() -> None:
    while _servers:
        _servers.pop().close()


@pytest.fixture
def compiling() -> Iterator[None]:
    """The observer asks this process whether it has compiled anything, and would find that it has in every later test."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    """A folder of policies with one in it, of which only the sources matter here."""
    folder = tmp_path / "policies" / "stand_in"
    folder.mkdir(parents=True)
    (folder / "policy.py").write_text("def build(preset, axes): ...\n")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    return folder.parent
