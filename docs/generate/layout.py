"""Layered drawing of an import graph, after Sugiyama: one row for each floor, imports run downwards.

An import that skips floors runs through a lane: one invisible node on every floor between. All imports of a folder share its
lane. Rows are ordered by the barycentres of their neighbours; then nodes move as near to their neighbours as spacing allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from import_graph import ImportGraph

ORDER_SWEEPS = 40
CENTRE_SWEEPS = 4000
STRAIGHT = 100  # weight of a segment within a lane, against 1 of one that begins or ends at a box
BOX_WIDTH = 104
LANE_WIDTH = 14
GAP = 22


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A folder on its floor, or the lane of a folder as it passes another floor."""

    floor: int
    folder: str
    is_lane: bool = False

    @property
    def width(self) -> int:
        return LANE_WIDTH if self.is_lane else BOX_WIDTH


Segment = tuple[Node, Node]  # from a floor to the next lower one
Rows = list[list[Node]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Centres of all nodes in pixels from the left, and the segments to draw between them."""

    centres: dict[Node, int]
    segments: tuple[Segment, ...]

    @property
    def width(self) -> int:
        return max(centre + node.width // 2 for node, centre in self.centres.items())


def lay_out(graph: ImportGraph) -> Layout:
    """Place the folders and lanes of a graph. The same graph gives the same layout."""
    segments = _segments(graph)
    rows = [[Node(floor, folder) for folder in folders] for floor, folders in enumerate(graph.floors)]
    for lane in sorted({node for segment in segments for node in segment if node.is_lane}):
        rows[lane.floor].append(lane)
    rows = _order(rows, segments)
    centres = _centre(rows, segments)
    left = min(centre - node.width / 2 for node, centre in centres.items())
    return Layout({node: round(centre - left) for node, centre in centres.items()}, tuple(segments))


def _segments(graph: ImportGraph) -> list[Segment]:
    segments: set[Segment] = set()
    for source, target in graph.direct_imports():
        top, bottom = graph.floor_of(source), graph.floor_of(target)
        path = [
            Node(top, source),
            *(Node(floor, target, is_lane=True) for floor in range(top + 1, bottom)),
            Node(bottom, target),
        ]
        segments.update(pairwise(path))
    return sorted(segments)


def _neighbours(rows: Rows, segments: Sequence[Segment]) -> dict[Node, list[Node]]:
    neighbours: dict[Node, list[Node]] = {node: [] for row in rows for node in row}
    for upper, lower in segments:
        neighbours[upper].append(lower)
        neighbours[lower].append(upper)
    return neighbours


def _order(rows: Rows, segments: Sequence[Segment]) -> Rows:
    """Return the rows in the order with the fewest crossings that alternating barycentre sweeps find."""
    neighbours = _neighbours(rows, segments)
    best, fewest = rows, _crossings(rows, segments)
    for sweep in range(ORDER_SWEEPS):
        downwards = sweep % 2 == 0
        rows = [list(row) for row in rows]
        for number in range(1, len(rows)) if downwards else range(len(rows) - 2, -1, -1):
            fixed = number - 1 if downwards else number + 1
            index = {node: position for position, node in enumerate(rows[fixed])}
            scale = len(rows[fixed]) / len(rows[number])
            barycentre = {}
            for position, node in enumerate(rows[number]):
                positions = [index[neighbour] for neighbour in neighbours[node] if neighbour.floor == fixed]
                barycentre[node] = sum(positions) / len(positions) if positions else position * scale
            rows[number].sort(key=barycentre.__getitem__)
        crossings = _crossings(rows, segments)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _crossings(rows: Rows, segments: Sequence[Segment]) -> int:
    index = {node: position for row in rows for position, node in enumerate(row)}
    return sum(
        (index[one[0]] - index[two[0]]) * (index[one[1]] - index[two[1]]) < 0
        for one, two in combinations(segments, 2)
        if one[0].floor == two[0].floor
    )


def _centre(rows: Rows, segments: Sequence[Segment]) -> dict[Node, float]:
    neighbours = _neighbours(rows, segments)
    centres: dict[Node, float] = {}
    for row in rows:
        left = 0.0
        for node in row:
            centres[node] = left + node.width / 2
            left += node.width + GAP
    for sweep in range(CENTRE_SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wishes = []
            for node in row:
                weights = {neighbour: STRAIGHT if node.is_lane and neighbour.is_lane else 1 for neighbour in neighbours[node]}
                total = sum(weights.values())
                centre = sum(centres[neighbour] * weight for neighbour, weight in weights.items())
                wishes.append((centre / total, total) if total else (centres[node], 1))
            centres.update(zip(row, _spread(row, wishes), strict=True))
    return centres


def _spread(row: Sequence[Node], wishes: Sequence[tuple[float, int]]) -> list[float]:
    """Return the centres nearest to the wishes (centre, weight) in weighted least squares at which no two nodes overlap.

    Pool adjacent violators: subtracting the smallest offsets turns spacing into a non-decreasing sequence.
    """
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    pools: list[tuple[float, int, int]] = []  # mean of (wish - offset), sum of weights, number of nodes
    for (wish, weight), offset in zip(wishes, offsets, strict=True):
        mean, total, count = wish - offset, weight, 1
        while pools and pools[-1][0] > mean:
            previous, pool_weight, size = pools.pop()
            mean = (previous * pool_weight + mean * total) / (pool_weight + total)
            total, count = pool_weight + total, size + count
        pools.append((mean, total, count))
    starts = [mean for mean, _, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]
