"""Observation of torch.compile on this rank: graphs, graph breaks, recompilations, what runs uncompiled, and compile time."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchbox.measure.phases import ProgressTracker
    from benchbox.registry.contracts import CompileMode
    from benchbox.registry.launch_record import CompilationRecord, GraphBreak, Recompilation, UncompiledFunction

_MAX_ENTRIES = 10_000  # that torch keeps of its compilations; 64 by default
_INSTALLED = ("site-packages", "dist-packages")


class CompilationWatch:
    """Watches torch.compile in its with blocks, and reports a compilation as the phase in which the rank is.

    A compilation is reported also with the mode `off`: FlexAttention and the steps of torchao's optimizers are always compiled
    on a GPU, for minutes, and without a word of it the launcher would take the rank for stuck.

    Args:
        tracker: the state of the rank.
        mode: with `off` there is a record only if something was compiled all the same.
    """

    def __init__(self, tracker: ProgressTracker, mode: CompileMode) -> None:
        self._tracker = tracker
        self._is_off = mode == "off"
        self._time_s = self._started_at = 0.0
        self.compilations = 0  # so far
        self._in_measured_steps = 0

    def __enter__(self) -> Self:
        from torch._dynamo import utils  # the first step of an optimizer imports torch._dynamo anyway
        from torch._dynamo.callback import callback_handler

        utils.set_compilation_metrics_limit(_MAX_ENTRIES)
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        return self

    def __exit__(self, *_: object) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._on_start)
        callback_handler.remove_end_callback(self._on_end)

    @contextmanager
    def of_measured_steps(self) -> Iterator[None]:
        """Watch steps that should compile nothing."""
        before = self.compilations
        with self:
            yield
        self._in_measured_steps = self.compilations - before

    def record(self) -> CompilationRecord | None:
        """Return what was compiled; None if nothing should be, and nothing was."""
        if self._is_off and not self.compilations:
            return None
        from torch._dynamo import utils

        graphs, entries = utils.counters["stats"]["unique_graphs"], utils.get_compilation_metrics()
        # Inductor's cache has the compiled code. The one of AOTAutograd before it has what leads there, in a few seconds.
        lookups = utils.counters["inductor"]
        return {
            "graphs": graphs,
            "graph_breaks": _graph_breaks(utils.graph_break_reasons),
            "recompilations": _recompilations(entries),
            "limits_reached": _limits_reached(entries),
            "uncompiled": _uncompiled(entries),
            "time_s": self._time_s,
            "from_cache": lookups["fxgraph_cache_hit"],
            "not_from_cache": lookups["fxgraph_cache_miss"] + lookups["fxgraph_cache_bypass"],
            "in_measured_steps": self._in_measured_steps,
        }

    # Torch calls these at the start and the end of a compilation, and not for one inside another.

    def _on_start(self, *_: Any) -> None:
        self._started_at = time.perf_counter()
        self._tracker.begin_compilation()

    def _on_end(self, *_: Any) -> None:
        self.compilations += 1
        self._time_s += time.perf_counter() - self._started_at
        self._tracker.end_compilation()


def _graph_breaks(reasons: list[Any]) -> list[GraphBreak]:
    """Return the places at which functions were cut into several graphs, each once."""
    breaks: Counter[tuple[str, str]] = Counter()
    for reason in reasons:
        # The innermost line outside of torch, which calls hooks and wrappers of its own.
        frames = [frame for frame in reason.user_stack if "torch" not in Path(frame.filename).parts] or reason.user_stack
        frame = frames[-1] if frames else None
        where = f"{_short_path(frame.filename)}:{frame.lineno}" if frame else "unknown"
        breaks[where, _first_line(reason.reason)] += 1
    return [{"where": where, "reason": reason, "count": count} for (where, reason), count in breaks.items()]


def _recompilations(entries: list[Any]) -> list[Recompilation]:
    """Return the functions that were compiled again, with the guard that failed."""
    return [
        {
            "function": _function(entry),
            "reason": _first_line(entry.recompile_reason),
        }
        for entry in entries
        if entry.recompile_reason and entry.co_filename  # backward graphs have no function of their own
    ]


def _limits_reached(entries: list[Any]) -> list[UncompiledFunction]:
    """Return the functions of which torch compiles no further variants: what no compiled one fits runs uncompiled.

    Torch refuses such a compilation before it notes the function. Earlier compilations of the same code, whose ids begin alike,
    have noted it.
    """
    functions = {_code_id(entry): _function(entry) for entry in entries if entry.co_filename}
    return [
        {
            "function": functions.get(_code_id(entry), "unknown"),
            "reason": _first_line(entry.recompile_reason or entry.fail_reason),
        }
        for entry in entries
        if not entry.co_filename and "recompile_limit" in (entry.fail_reason or "")  # or accumulated_recompile_limit
    ]


def _uncompiled(entries: list[Any]) -> list[UncompiledFunction]:
    """Return the functions that torch gave up to compile, each once, with the line at which it did.

    It then runs the whole function uncompiled, without an error: where a graph breaks inside a loop or a `try`, it cannot go on
    behind the break. Such breaks are not among `torch._dynamo.utils.graph_break_reasons`.
    """
    places = {
        (_function(entry), f"{_first_line(entry.fail_reason or entry.fail_type)} (line {entry.fail_user_frame_lineno})"): None
        for entry in entries
        if entry.fail_type and entry.co_filename
    }
    return [{"function": function, "reason": reason} for function, reason in places]


def _code_id(entry: Any) -> str:
    """Return the part of a compilation's id that all compilations of one code object have in common: `0` of `0/8`."""
    return str(entry.compile_id).rpartition("/")[0]


def _function(entry: Any) -> str:
    return f"{entry.co_name} ({_short_path(entry.co_filename)}:{entry.co_firstlineno})"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _short_path(file: str) -> str:
    """Return the path of a source file from the folder of installed packages, or from the working directory."""
    path = Path(file)
    for folder in _INSTALLED:
        if folder in path.parts:
            return str(Path(*path.parts[path.parts.index(folder) + 1 :]))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
