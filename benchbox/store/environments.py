"""Merging the environments that ranks observed into the one of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.store.rank_result import RankResult


def merge_environments(ranks: Sequence[RankResult]) -> dict[str, Any]:
    """Return the environment of the lowest rank; of a launch on several nodes with `nodes`, that of each node and its ranks.

    The machine of such a launch is named after the machines of all nodes and their number, so that it is neither compared with
    a launch on another number of nodes nor judged by its baseline.
    """
    environments = [dict(result.get("environment") or {}) for result in ranks]
    if not environments:
        return {}
    merged = {key: value for key, value in environments[0].items() if key not in ("node", "host")}
    if "node" not in environments[0]:
        return merged
    nodes: dict[int, dict[str, Any]] = {}
    for result, environment in zip(ranks, environments, strict=True):
        node = nodes.setdefault(environment["node"], {**environment, "ranks": []})
        node["ranks"].append(result["rank"])
    machines = sorted({node["machine"] for node in nodes.values()})
    return {**merged, "machine": f"{'-and-'.join(machines)}-{len(nodes)}-nodes", "nodes": [nodes[key] for key in sorted(nodes)]}
