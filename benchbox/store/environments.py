"""Merging the environments that ranks observed into the one of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from benchbox.registry.launch_environment import RankEnvironment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.registry.launch_environment import LaunchEnvironment, NodeEnvironment
    from benchbox.store.rank_result import RankResult


def merge_environments(ranks: Sequence[RankResult]) -> LaunchEnvironment:
    """Return the environment of the lowest rank; of a launch on several nodes with `nodes`, that of each node and its ranks.

    The machine of such a launch is named after the machines of all nodes and their number, so that it is neither compared with
    a launch on another number of nodes nor judged by its baseline.
    """
    environments = [result.get("environment") or RankEnvironment() for result in ranks]
    if not environments:
        return {}
    merged = cast("LaunchEnvironment", dict(environments[0]))
    if "node" not in merged:
        return merged
    del merged["node"], merged["host"]
    nodes: dict[int, NodeEnvironment] = {}
    for result, environment in zip(ranks, environments, strict=True):
        node = nodes.setdefault(environment["node"], {**environment, "ranks": []})
        node["ranks"].append(result["rank"])
    machines = sorted({node["machine"] for node in nodes.values()})
    merged["machine"] = f"{'-and-'.join(machines)}-{len(nodes)}-nodes"
    merged["nodes"] = [nodes[number] for number in sorted(nodes)]
    return merged
