"""A figure before it is drawn, and what turns it into SVG for a page or into files for a paper."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from benchbox.store.files import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*<>"
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
DPI = 200  # of PNG files


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of a figure. Series are told apart by markers too, so that greyscale suffices."""

    ink: str
    soft: str
    line: str
    card: str
    accent: str
    bad: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        """Return the colour of a series."""
        return self.series[index % len(self.series)]


# The colours of Okabe and Ito (2008), which people with any colour vision tell apart, but their yellow, which is lost on white.
PRINT = Palette(
    ink="#000000",
    soft="#4d4d4d",
    line="#d0d0d0",
    card="#ffffff",
    accent="#0072b2",
    bad="#d55e00",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"),
)
# Stand-ins for variables of the page's style, which differ in light and dark.
_VARIABLES = {
    f"#0101{number:02x}": f"var(--{name})"
    for number, name in enumerate(("ink", "soft", "line", "card", "accent", "bad", *(f"s{index}" for index in range(9))))
}
_INK, _SOFT, _LINE, _CARD, _ACCENT, _BAD, *_SERIES = _VARIABLES
PAGE = Palette(ink=_INK, soft=_SOFT, line=_LINE, card=_CARD, accent=_ACCENT, bad=_BAD, series=tuple(_SERIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure to be drawn. `description` says in one sentence what to see in it, and where the same numbers are."""

    key: str
    title: str
    description: str
    draw: Callable[[Palette], Figure]

    def svg(self) -> str:
        """Return an `<svg>` element with the colours and the font of a page, and with text as text."""
        with _settings(self.key):
            return _element(_svg(self.draw(PAGE)), self)

    def save_svg(self, folder: Path) -> Path:
        """Write KEY.svg into a folder, in colours for white paper."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.key}.svg"
        with _settings(self.key):
            write_text(path, _svg(self.draw(PRINT)))
        return path

    def save(self, folder: Path) -> list[Path]:
        """Write KEY.svg, KEY.pdf and KEY.png into a folder, in colours for white paper; return their paths."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        paths = [self.save_svg(folder), folder / f"{self.key}.pdf", folder / f"{self.key}.png"]
        with _settings(self.key):
            figure = self.draw(PRINT)
            FigureCanvasPdf(figure).print_pdf(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
            FigureCanvasAgg(figure)
            figure.savefig(paths[2], dpi=DPI, metadata={"Software": None})
        return paths


@contextmanager
def _settings(key: str) -> Iterator[None]:
    """Set what makes a drawing independent of the user's configuration, and its bytes of the time."""
    import matplotlib as mpl

    with mpl.rc_context(), mpl.rc_context({"font.family": "sans-serif"}):
        mpl.rcdefaults()
        mpl.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": key, "font.size": 10, "axes.unicode_minus": False, "pdf.fonttype": 42}
        )
        yield


def _svg(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(stream, metadata=metadata)
    return stream.getvalue().decode()


def _element(svg: str, drawing: Drawing) -> str:
    """Return only the element, with ids of its own, the fonts and colours of the page, and its description."""
    key = drawing.key
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # of groups, which nothing refers to
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    svg = re.sub(r"font: ([0-9.]+px) [^;\"]+", r"font-size: \1; font-family: inherit", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    opening, _, rest = svg.partition(">")
    opening = re.sub(r' (width|height)="[0-9.]+pt"', "", opening)
    title, description = escape(drawing.title), escape(drawing.description)
    named = f'role="img" aria-labelledby="{key}-title {key}-description" class="figure"'
    texts = f'<title id="{key}-title">{title}</title><desc id="{key}-description">{description}</desc>'
    return f"{opening} {named}>{texts}{rest}".rstrip()


def new_figure(palette: Palette, rows: int = 1, columns: int = 1, *, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels, row by row, each with a grid and without a frame. `size` is that of a panel, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained", facecolor=palette.card)
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels:
        panel.set_facecolor(palette.card)
        panel.grid(color=palette.line, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(colors=palette.soft, length=3)
        for spine in panel.spines.values():
            spine.set_color(palette.line)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def add_legend(figure: Figure, palette: Palette, handles: Sequence[Any]) -> None:
    """Add a legend of all panels above them."""
    legend = figure.legend(handles=list(handles), loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_color(palette.ink)


def byte_scale(largest: float) -> tuple[float, str]:
    """Return the unit of memory in which this value has at most four digits before the point."""
    return next(
        ((2.0**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**power), (1.0, "B")
    )
