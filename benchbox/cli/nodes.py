"""Options of several nodes for `run` and `train`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.launch.job import Launcher
    from benchbox.launch.nodes.settings import NodeSettings

_EXIT_STOPPED = 130


def check_world_sizes(file: Path | None, overrides: Mapping[str, str], world_sizes: "Iterable[int]", nnodes: int) -> None:
    """Check that the ranks of every cell can be divided among the nodes.

    Args:
        file: the matrix or training file, to name the position of the world size; None where there is none.

    Raises:
        ConfigurationError: with that position.
    """
    from benchbox.launch.nodes.settings import check_divisible
    from benchbox.spec.overrides import apply_overrides
    from benchbox.spec.source import read_source

    if nnodes == 1:
        return
    where = "world_size"
    if file is not None:
        source = read_source(file)
        apply_overrides(source, overrides)
        axis = ("axes", "world_size")
        where = source.where(axis if source.at(axis) is not None else ("world_size",))
    for world_size in sorted(set(world_sizes)):
        check_divisible(world_size, nnodes, where)


@contextmanager
def open_launcher(name: str, folder: Path, nodes: "NodeSettings | None", stop: Callable[[], bool]) -> "Iterator[Launcher]":
    """Yield the launcher of this name, or that of several nodes once they have joined in `folder`.

    Raises:
        ConfigurationError: a node did not join.
    """
    from benchbox.launch.nodes.coordinator import coordinate
    from benchbox.launch.process import make_launcher

    if nodes is None:
        yield make_launcher(name)
        return
    if name == "local":
        print(f"{nodes.count} nodes: torchrun starts the ranks, since --launcher local forks them on one machine only")
    print(f"waiting for {nodes.count - 1} other node(s) in {folder}", flush=True)
    with coordinate(folder, nodes, stop) as launcher:
        if launcher is None:
            raise typer.Exit(_EXIT_STOPPED)
        yield launcher


def follow_node_0(folder: Path, nodes: "NodeSettings") -> None:
    """Take part in the launches of node 0 until it ends.

    Raises:
        BenchboxError: see `follow`.
    """
    from benchbox.launch.nodes.follower import follow
    from benchbox.launch.process.signals import stop_on_signals

    with stop_on_signals() as stop:
        completed = follow(folder, nodes, stop=stop, on_line=lambda line: print(line, flush=True))
    if not completed:
        print("stopped; node 0 ends the running launch", file=sys.stderr)
        raise typer.Exit(_EXIT_STOPPED)
    print("node 0 has ended")
