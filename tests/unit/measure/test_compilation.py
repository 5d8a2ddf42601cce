"""The work of torch.compile is observed: graphs, where they break, why functions are compiled again, when, and when no more."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch._dynamo import utils

from benchbox.measure.compilation import CompilationWatch
from benchbox.measure.phases import ProgressTracker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    def forget() -> None:
        torch.compiler.reset()
        utils.counters.clear()
        utils.graph_break_reasons.clear()
        utils.clear_compilation_metrics()

    forget()
    yield
    forget()


@pytest.fixture
def states() -> list[str | None]:
    return []


@pytest.fixture
def watch(states: list[str | None]) -> CompilationWatch:
    return CompilationWatch(ProgressTracker("warmup", lambda state: states.append(state.phase)), "blocks")


def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


def test_a_compilation_is_counted_timed_and_reported_as_the_phase_of_the_rank(
    watch: CompilationWatch, states: list[str | None]
) -> None:
    compiled = torch.compile(double, backend="eager")
    with watch:
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    record = watch.record()
    assert record is not None
    assert record["graphs"] == 1
    assert record["time_s"] > 0
    assert record["graph_breaks"] == record["recompilations"] == record["uncompiled"] == []
    assert record["in_measured_steps"] == 0
    assert states == [None, "torch.compile", None]


def test_a_graph_break_has_a_place_and_a_reason(watch: CompilationWatch) -> None:
    def broken(value: torch.Tensor) -> torch.Tensor:
        value = value + 1
        torch._dynamo.graph_break()
        return value * 2

    with watch:
        torch.compile(broken, backend="eager")(torch.ones(2))
    record = watch.record()
    assert record is not None
    assert record["graphs"] == 2
    (entry,) = record["graph_breaks"]
    line = broken.__code__.co_firstlineno + 2
    assert entry["where"] == f"tests/unit/measure/test_compilation.py:{line}"
    assert "graph_break" in entry["reason"]


def test_a_function_that_torch_gives_up_is_recorded_with_its_place_and_the_reason(watch: CompilationWatch) -> None:
    """Behind a break inside a loop torch cannot go on: it runs the function uncompiled, and lists no graph break of it.

    Torch 2.10 runs such a loop uncompiled too, as a graph break.
    """

    def looping(value: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            value = value + value.sum().item()
        return value

    def layers(value: torch.Tensor) -> torch.Tensor:
        return 2 * looping(value + 1)

    with watch:
        compiled = torch.compile(layers, backend="eager")
        for _ in range(2):
            compiled(torch.ones(2))
    record = watch.record()
    assert record is not None
    assert record["graphs"] > 0
    line = looping.__code__.co_firstlineno
    if torch.__version__.startswith("2.10."):
        (graph_break,) = record["graph_breaks"]
        assert graph_break["where"] == f"tests/unit/measure/test_compilation.py:{line + 2}"
        assert "item()" in graph_break["reason"]
        return
    (entry,) = record["uncompiled"]
    assert entry["function"] == f"looping (tests/unit/measure/test_compilation.py:{line})"
    assert entry["reason"].endswith(f"(line {line + 2})")
    assert "item()" in entry["reason"]


def test_a_compilation_in_a_measured_step_is_counted_with_the_guard_that_failed(watch: CompilationWatch) -> None:
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with watch:
        compiled(torch.ones(2))
    compiled(torch.ones(5))  # outside: of a validation, say
    with watch.of_measured_steps():
        compiled(torch.ones(3))
    record = watch.record()
    assert record is not None
    assert record["in_measured_steps"] == 1
    assert [entry["function"].partition(" ")[0] for entry in record["recompilations"]] == ["double", "double"]
    assert all("size" in entry["reason"] for entry in record["recompilations"])


def test_a_function_that_reaches_the_limit_of_variants_is_recorded_with_its_place_and_the_last_guard(
    watch: CompilationWatch,
) -> None:
    """Torch raises at the limit before it notes the function, and the code runs uncompiled without an error."""
    compiled = torch.compile(double, backend="eager", dynamic=False)
    other = torch.compile(lambda value: value + 1, backend="eager")
    with watch, torch._dynamo.config.patch(recompile_limit=3):
        for size in range(2, 5):
            compiled(torch.ones(size))
        other(torch.ones(2))
        within = watch.record()
        for size in range(5, 8):
            assert compiled(torch.ones(size)).tolist() == [2.0] * size
    record = watch.record()
    assert within is not None
    assert record is not None
    assert within["limits_reached"] == []
    assert record["graphs"] == within["graphs"] == 4
    assert record["recompilations"] == within["recompilations"]
    (entry,) = record["limits_reached"]
    line = double.__code__.co_firstlineno
    assert entry["function"] == f"double (tests/unit/measure/test_compilation.py:{line})"
    assert "size mismatch at index 0. expected 4, actual 5" in entry["reason"]


def test_a_compilation_that_nobody_asked_for_is_recorded_and_so_is_that_it_was_in_a_measured_step(
    states: list[str | None],
) -> None:
    """FlexAttention is compiled on every GPU, in steps too: a variant of a policy's blocks when it first appears."""
    watch = CompilationWatch(ProgressTracker("warmup", lambda state: states.append(state.phase)), "off")
    compiled = torch.compile(double, backend="eager", dynamic=False)
    with watch:
        assert watch.record() is None
        compiled(torch.ones(2))
    with watch.of_measured_steps():
        compiled(torch.ones(3))
    assert "torch.compile" in states
    record = watch.record()
    assert record is not None
    assert (record["graphs"], record["in_measured_steps"], len(record["recompilations"])) == (2, 1, 1)


def test_code_that_was_loaded_is_told_from_code_that_was_compiled_whatever_led_there(
    watch: CompilationWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph with a backward has two pieces of code. AOTAutograd looks up what leads to them in a cache of its own, which
    another training may miss while the code of both is there.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(3):
        torch.compiler.reset()
        utils.counters.clear()
        with watch:
            torch.compile(double)(torch.ones(2, requires_grad=True)).sum().backward()
        record = watch.record()
        assert record is not None
        found.append((record["graphs"], record["from_cache"], record["not_from_cache"]))
        shutil.rmtree(tmp_path / "aotautograd", ignore_errors=True) if len(found) == 2 else None
    assert found == [(1, 0, 2), (1, 2, 0), (1, 2, 0)]
