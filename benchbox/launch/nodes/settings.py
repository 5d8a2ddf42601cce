"""Settings of a launch on several nodes, by the names and variables that torchrun has."""

from __future__ import annotations

from dataclasses import dataclass

from benchbox.errors import ConfigurationError, Problem

DEFAULT_PORT = 29500  # torchrun's
DEFAULT_TIMEOUT_S = 180.0  # NFS shows changes of other machines after up to a minute by default


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The nodes of a launch, and which of them this process is on. Node 0 plans, supervises and writes the records."""

    count: int
    rank: int
    master_addr: str  # of node 0, as the other nodes reach it
    master_port: int
    timeout_s: float  # until a node that has not joined, or no longer reports, is lost


def read_node_settings(
    *, nnodes: int, node_rank: int | None, master_addr: str | None, master_port: int, timeout_s: float
) -> NodeSettings | None:
    """Check the options of the command line; None for a single node.

    Raises:
        ConfigurationError: a setting is missing or impossible; with every problem.
    """
    if nnodes == 1:
        return None
    problems = []
    if nnodes < 1:
        problems.append(Problem("--nnodes", f"{nnodes} nodes cannot run anything", "the least is 1"))
    if node_rank is None:
        problems.append(Problem("--node-rank", f"is missing for {nnodes} nodes", "it is 0 on one node, 1 on the next, ..."))
    elif not 0 <= node_rank < nnodes:
        problems.append(Problem("--node-rank", f"{node_rank} of {nnodes} nodes", f"ranks of nodes go from 0 to {nnodes - 1}"))
    if not master_addr:
        problems.append(Problem("--master-addr", f"is missing for {nnodes} nodes", "name the address of node 0"))
    elif not all(character.isalnum() or character in ".-:_%" for character in master_addr):
        problems.append(Problem("--master-addr", f"{master_addr!r} is not an address", "name a host or an IP address"))
    if not 0 < master_port < 2**16:
        problems.append(Problem("--master-port", f"{master_port} is not a port", "choose one from 1 to 65535"))
    if timeout_s <= 0:
        problems.append(Problem("--node-timeout", f"{timeout_s} s leave no time to join", "give seconds above 0"))
    if problems:
        raise ConfigurationError(problems)
    assert node_rank is not None
    assert master_addr is not None
    return NodeSettings(count=nnodes, rank=node_rank, master_addr=master_addr, master_port=master_port, timeout_s=timeout_s)


def check_divisible(world_size: int, nnodes: int, where: str) -> None:
    """Raise ConfigurationError unless every node gets the same number of ranks.

    Args:
        where: position of the world size in a file.
    """
    if world_size % nnodes:
        message = f"{world_size} ranks cannot be divided equally among {nnodes} nodes"
        raise ConfigurationError(Problem(where, message, f"set it to a multiple of {nnodes}, or change the number of nodes"))
