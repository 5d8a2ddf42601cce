"""SVG by matplotlib: with text as text, the same bytes every time, and the colours and fonts of a page in place of its own."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from matplotlib.figure import Figure

_STYLE = Path(__file__).parents[1] / "templates" / "style.css"
MIN_SCALE, MAX_SCALE = 1.25, 1.6  # pixels of a page per point: a narrower screen scrolls, so that its labels can be read


@contextmanager
def settings(key: str) -> Iterator[None]:
    """Set what makes a drawing independent of the user's configuration, and its bytes of the time."""
    import matplotlib as mpl

    with mpl.rc_context(), mpl.rc_context({"font.family": "sans-serif"}):
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": key,
                "font.size": 10,
                "text.parse_math": False,  # names from outside may have dollar signs, which would begin a formula
                "axes.unicode_minus": False,
                "hatch.linewidth": 0.7,
                "pdf.fonttype": 42,
            }
        )
        yield


def figure_svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG file."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(stream, metadata=metadata)
    return stream.getvalue().decode()


def page_element(svg: str, key: str, title: str, description: str, variables: Mapping[str, str]) -> str:
    """Return only the `<svg>` element, with ids of its own, the fonts and colours of the page, and its description.

    Args:
        variables: what replaces a colour of the drawing, by colour.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # of groups, which nothing refers to
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    svg = re.sub(r"\bfont: ((?:bold|\d+) )?([0-9.]+px) ", _font_declarations, svg)  # as matplotlib writes it before 3.10
    svg = re.sub(r"font-family: [^;\"]+", "font-family: inherit", svg)
    svg = re.sub(r'\b(?:d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    for colour, variable in variables.items():
        svg = svg.replace(colour, variable)
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (width|height)="[0-9.]+pt"', "", opening)
    width = float(opening.split('viewBox="')[1].split()[2])
    named = f'role="img" aria-labelledby="{key}-title {key}-description" class="figure"'
    style = f'style="min-width: {MIN_SCALE * width:.0f}px; max-width: {MAX_SCALE * width:.0f}px"'
    texts = f'<title id="{key}-title">{escape(title)}</title><desc id="{key}-description">{escape(description)}</desc>'
    return f"{opening} {named} {style}>{texts}{rest}".rstrip()


def _font_declarations(shorthand: re.Match[str]) -> str:
    """Return the size and weight of a font as declarations of their own."""
    weight = f"font-weight: {shorthand[1].strip()}; " if shorthand[1] else ""
    return f"{weight}font-size: {shorthand[2]}; font-family: "


def themed_file(element: str) -> str:
    """Return the element of a page as a complete SVG file, which follows light and dark by itself."""
    light, dark = re.findall(r":root (\{.*?\})", _STYLE.read_text(encoding="utf-8"), flags=re.DOTALL)[:2]
    style = (
        f"<style>svg {light}\n@media (prefers-color-scheme: dark) {{ svg {dark} }}\n"
        "svg { background: var(--card); font-family: system-ui, sans-serif; }</style>"
    )
    opening, _, rest = element.partition(">")
    return f"{opening}>{style}{rest}\n"
