"""Plugin: tests marked `exhaustive` run with `--exhaustive` only, and a run says how many it left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LEFT_OUT = "exhaustive_tests_left_out"


class Tiers:
    """Selects the tests of a run; in the main process of pytest-xdist, reads from its workers how many they left out."""

    def __init__(self) -> None:
        self._left_out = 0

    @pytest.hookimpl(trylast=True)  # counts what -k and -m select
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if config.getoption("exhaustive"):
            return
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        if left_out:
            items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
            config.hook.pytest_deselected(items=left_out)
        self._left_out = len(left_out)
        if hasattr(config, "workeroutput"):
            config.workeroutput[_LEFT_OUT] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Every worker collects all tests."""
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(f"exhaustive tests left out: {self._left_out}; --exhaustive and make test-all run them")


def in_tiers(cases: Iterable[Any], is_default: Callable[[Any], bool]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, those that are not run by default marked `exhaustive`.

    A case is a value, or the tuple of the values of several arguments; a value that is a tuple stands in a tuple of one.
    """
    return [_case(case, () if is_default(case) else (pytest.mark.exhaustive,)) for case in cases]


def _case(case: Any, marks: tuple[pytest.MarkDecorator, ...]) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
