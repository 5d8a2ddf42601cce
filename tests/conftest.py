"""Fixtures of all tests, the fork servers they share, and how pytest-xdist distributes them."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.fork_servers import SharedForkServers
from tests.support.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

# A shell starts background jobs with SIGINT ignored, children inherit that, and what ignores Ctrl-C cannot be tested by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of nohup and SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# A prediction imports torch and traces: tests of predictions ask for it.
os.environ.setdefault("BENCHBOX_ESTIMATE", "false")

# Libraries set such variables in this process when they are imported or first compile something.
_OF_LIBRARIES = ("TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
_variables = set(os.environ)  # those that the shared fork servers had when they imported

# Ranks have limits of their own, without progress: on a busy machine a fixture of many of them takes longer than one test may.
_RANKS_TIMEOUT_S = 3600


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


class _SharedServers:
    """Plugin of the main process that starts the fork servers when a test needs ranks. Workers of pytest-xdist use them too.

    Without workers they start with the first such test: while they import, those of `tests/perf` before it would measure.
    """

    def __init__(self) -> None:
        self._servers = SharedForkServers()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("ranks"):
            self._servers.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        if any(test_id.startswith(_WITH_RANKS) for test_id in ids):  # markers stay in the workers
            self._servers.start()

    def pytest_unconfigure(self) -> None:
        self._servers.close()


_WITH_RANKS = "tests/integration/"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run also the tests that are marked `exhaustive`")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers())
    if not _is_worker(config):
        config.pluginmanager.register(_SharedServers())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections: they visit all modules and items again and again, and nearly all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest, so that no worker of pytest-xdist is left with one of them in the end."""
    for item in items:
        if item.get_closest_marker("ranks") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_RANKS_TIMEOUT_S))
    if _is_worker(config):
        with_ranks = {item.path for item in items if item.get_closest_marker("ranks")}
        items.sort(key=lambda item: item.path not in with_ranks)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the variables that shared fork servers have: those of the main process, which starts them."""
    if _is_worker(session.config):
        _variables.difference_update([name for name in os.environ if name.startswith("PYTEST_XDIST_")])
    else:
        _variables.update(os.environ)
    # Every full garbage collection, also those that tests ask for, would visit all test items and all that they import.
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries report that their objects leaked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Remove other variables of libraries and workers: a server serves only processes in the environment it imported in."""
    for name in os.environ.keys() - _variables:
        if name.startswith((*_OF_LIBRARIES, "PYTEST_XDIST_")):
            del os.environ[name]


@pytest.fixture
def compiling() -> Iterator[None]:
    """The observer asks this process whether it has compiled anything, and would find that it has in every later test."""
    yield
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test on one thread of torch: sums have one order for all shapes, and times are those of one core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    """A folder of policies with one in it, of which only the sources matter here."""
    folder = tmp_path / "policies" / "stand_in"
    folder.mkdir(parents=True)
    (folder / "policy.py").write_text("def build(preset, axes): ...\n")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    return folder.parent


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Return whether tests that are marked `exhaustive` run too, for fixtures that run the cells of several tests."""
    return pytestconfig.getoption("exhaustive")
