"""The picture of the architecture: an SVG with one row for each floor, which follows the reader's light or dark theme."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layout import BOX_WIDTH, Layout, Node, lay_out

if TYPE_CHECKING:
    from import_graph import ImportGraph

BOX_HEIGHT = 30
FLOOR_HEIGHT = 62
MARGIN = 20
LEGEND_HEIGHT = 58

STYLE = """\
  :root { color-scheme: light dark; }
  .page { fill: #ffffff; } .band { fill: #f4f6f8; } .box { fill: #ffffff; stroke: #57606a; }
  .free { fill: #ddf4ff; stroke: #0969da; } .line { stroke: #8c959f; } .head { fill: #8c959f; }
  text { fill: #1f2328; } .note { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .band { fill: #151b23; } .box { fill: #0d1117; stroke: #9198a1; }
    .free { fill: #0c2d4d; stroke: #4493f8; } .line { stroke: #768390; } .head { fill: #768390; }
    text { fill: #f0f6fc; } .note { fill: #9198a1; }
  }
  .box { stroke-width: 1.2; } .line { fill: none; stroke-width: 1.4; }
  text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .name { text-anchor: middle; } .note { font-size: 12px; }"""

ARROW_NOTE = "Arrows are imports; those that a longer path implies are left out."
ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0 8 4 0 8z"/></marker>'
)


def draw_architecture(graph: ImportGraph) -> str:
    """Return the SVG text. The same graph gives the same bytes."""
    layout = lay_out(graph)
    width = layout.width + 2 * MARGIN
    height = len(graph.floors) * FLOOR_HEIGHT + LEGEND_HEIGHT
    bands = [
        f'<rect class="band" x="0" y="{floor * FLOOR_HEIGHT}" width="{width}" height="{FLOOR_HEIGHT}"/>'
        for floor in range(0, len(graph.floors), 2)
    ]
    nodes = sorted(layout.centres)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "<title>Folders of benchbox and the imports between them</title>",
        f"<style>\n{STYLE}\n</style>",
        ARROW,
        f'<rect class="page" width="{width}" height="{height}"/>',
        *bands,
        *(_line(upper, lower, layout) for upper, lower in layout.segments),
        *(_lane(node, layout) for node in nodes if node.is_lane),
        *(_box(node, layout, graph) for node in nodes if not node.is_lane),
        *_legend(len(graph.floors) * FLOOR_HEIGHT),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(node: Node, layout: Layout) -> int:
    return layout.centres[node] + MARGIN


def _edges(node: Node) -> tuple[int, int]:
    """Return the top and the bottom of a node in pixels."""
    top = node.floor * FLOOR_HEIGHT + (FLOOR_HEIGHT - BOX_HEIGHT) // 2
    return top, top + BOX_HEIGHT


def _line(upper: Node, lower: Node, layout: Layout) -> str:
    start_x, start_y = _x(upper, layout), _edges(upper)[1]
    end_x, end_y = _x(lower, layout), _edges(lower)[0]
    middle = (start_y + end_y) // 2
    arrow = "" if lower.is_lane else ' marker-end="url(#arrow)"'
    path = f"M{start_x} {start_y}C{start_x} {middle} {end_x} {middle} {end_x} {end_y}"
    return f'<path class="line" d="{path}"{arrow}/>'


def _lane(node: Node, layout: Layout) -> str:
    top, bottom = _edges(node)
    return f'<path class="line" d="M{_x(node, layout)} {top}V{bottom}"/>'


def _box(node: Node, layout: Layout, graph: ImportGraph) -> str:
    top, bottom = _edges(node)
    kind = "box free" if node.folder in graph.torch_free else "box"
    left = _x(node, layout) - BOX_WIDTH // 2
    return (
        f'<rect class="{kind}" x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{_x(node, layout)}" y="{(top + bottom) // 2 + 5}">{node.folder}</text>'
    )


def _legend(top: int) -> list[str]:
    return [
        f'<rect class="box free" x="{MARGIN}" y="{top + 12}" width="16" height="12" rx="3"/>',
        f'<text class="note" x="{MARGIN + 24}" y="{top + 22}">never imports torch</text>',
        f'<text class="note" x="{MARGIN}" y="{top + 44}">{ARROW_NOTE}</text>',
    ]
