"""Options of several nodes for `run` and `train`."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchbox.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.launch.job import Launcher
    from benchbox.launch.nodes.files import NodeFile
    from benchbox.launch.nodes.settings import NodeSettings


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
def open_node_0(folder: Path, nodes: "NodeSettings | None") -> "Iterator[NodeFile | None]":
    """Report in `folder` that node 0 runs, so that the others wait for it while it prepares; yield None if there are none."""
    from benchbox.launch.nodes.files import NodeFile

    if nodes is None:
        yield None
        return
    with NodeFile(folder, 0) as file:
        yield file


def open_launcher(name: str, nodes: "NodeSettings | None", node_0: "NodeFile | None", stop: Callable[[], bool]) -> "Launcher":
    """Return the launcher of this name, or that of several nodes once they have joined node 0.

    Raises:
        ConfigurationError: a node did not join.
        typer.Exit: the user stopped before.
    """
    from benchbox.launch.nodes.coordinator import wait_for_nodes
    from benchbox.launch.process import make_launcher

    if nodes is None or node_0 is None:
        return make_launcher(name)
    if name == "local":
        print(f"{nodes.count} nodes: torchrun starts the ranks, since --launcher local forks them on one machine only")
    print(f"waiting for {nodes.count - 1} other node(s) in {node_0.folder}", flush=True)
    launcher = wait_for_nodes(node_0, nodes, stop)
    if launcher is None:
        raise typer.Exit(EXIT_STOPPED)
    return launcher


def follow_node_0(folder: Path, nodes: "NodeSettings", *, trains: bool = False) -> None:
    """Take part in the launches of node 0 until it ends.

    A signal ends the ranks of this node; the first one to a training stops it on all nodes after a step, with a checkpoint.

    Raises:
        BenchboxError: see `follow`.
    """
    from benchbox.launch.nodes.follower import follow
    from benchbox.launch.process.signals import collect_stop_signals

    with collect_stop_signals() as received:
        completed = follow(
            folder,
            nodes,
            stop=lambda: len(received) > trains,
            ask=lambda: trains and bool(received),
            on_line=lambda line: print(line, flush=True),
        )
    if not completed:
        print("stopped; node 0 ends the running launch", file=sys.stderr)
    else:
        print("node 0 has ended")
    if received:
        raise typer.Exit(EXIT_STOPPED)
