"""A figure before it is drawn, its colours, and the files that it is written into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchbox.report.figures.svg import figure_svg, page_element, settings, themed_file
from benchbox.store.files import atomic_file, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Section = Literal["figures", "charts", "ranks", "equivalence", "trainings", "trend"]

WIDE, HALF = 10.4, 5.2  # inches: a figure that has the width of a page, or half of it
MARKERS = "osD^vPX*<>"
# Of the colours that lie side by side in one bar, so that greyscale suffices to tell them apart. Only lines: the circles of
# matplotlib's dotted hatches are 200 kB of SVG.
HATCHES = {
    "p0": "----",
    "p1": "",
    "p2": "////",
    "p3": "xxxx",
    "p4": "\\\\\\\\",
    "p5": "++++",
    "p6": "||||",
    "p7": "xx",
    "neutral": "//",
}
DPI = 200  # of PNG files
_ROW_NAME = 64  # characters: two fifths of the width of a page
_LEGEND_CHARACTER, _LEGEND_HANDLE = 5.2, 44  # points: a generous character of the font, and a handle with the gaps beside it


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of a figure. Series are told apart by markers and parts by hatches too, so that greyscale suffices."""

    ink: str
    soft: str
    line: str
    card: str
    accent: str
    bad: str
    ok: str
    neutral: str
    series: tuple[str, ...]
    parts: tuple[str, ...]  # of a step

    def of(self, index: int) -> str:
        """Return the colour of a series."""
        return self.series[index % len(self.series)]

    def named(self, name: str) -> str:
        """Return a colour by its name in the page's style: `s0` and so on of a series, `p0` of a part, or of a field."""
        if name[1:].isdigit():
            return self.of(int(name[1:])) if name[0] == "s" else self.parts[int(name[1:])]
        colour: str = getattr(self, name)
        return colour


# The colours of Okabe and Ito (2008), which people with any colour vision tell apart, but their yellow, which is lost on white;
# of parts also a grey and an indigo.
PRINT = Palette(
    ink="#000000",
    soft="#4d4d4d",
    line="#d0d0d0",
    card="#ffffff",
    accent="#0072b2",
    bad="#d55e00",
    ok="#009e73",
    neutral="#b3b3b3",
    series=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"),
    parts=("#8c8c8c", "#56b4e9", "#0072b2", "#e69f00", "#cc79a7", "#332288", "#d55e00", "#009e73"),
)
# Stand-ins for variables of the page's style, which differ in light and dark.
_NAMES = ("ink", "soft", "line", "card", "accent", "bad", "ok", "neutral")
_SERIES, _PARTS = tuple(f"s{index}" for index in range(9)), tuple(f"p{index}" for index in range(8))
_COLOURS = {name: f"#0101{number:02x}" for number, name in enumerate((*_NAMES, *_SERIES, *_PARTS))}
_VARIABLES = {colour: f"var(--{name})" for name, colour in _COLOURS.items()}
PAGE = Palette(
    **{name: _COLOURS[name] for name in _NAMES},
    series=tuple(_COLOURS[name] for name in _SERIES),
    parts=tuple(_COLOURS[name] for name in _PARTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure to be drawn. `description` says in one sentence what to see in it, and where the same numbers are."""

    key: str
    title: str
    description: str
    draw: Callable[[Palette], Figure]
    section: Section = "figures"  # of the page
    is_wide: bool = True
    values: str = ""  # all of them as text, for readers who do not see the figure
    notes: tuple[str, ...] = ()  # sentences that must be read with it

    def svg(self) -> str:
        """Return an `<svg>` element with the colours and the font of a page, and with text as text."""
        description = " ".join(filter(None, (self.description, self.values, *self.notes)))
        with settings(self.key):
            return page_element(figure_svg(self.draw(PAGE)), self.key, self.title, description, _VARIABLES)

    def themed_svg(self) -> str:
        """Return a complete SVG file with text as text, for light and dark pages."""
        return themed_file(self.svg())

    def save_svg(self, folder: Path) -> Path:
        """Write KEY.svg into a folder, in colours for white paper."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.key}.svg"
        with settings(self.key):
            write_text(path, figure_svg(self.draw(PRINT)))
        return path

    def save(self, folder: Path) -> list[Path]:
        """Write KEY.svg, KEY.pdf and KEY.png into a folder, in colours for white paper; return their paths."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        paths = [self.save_svg(folder), folder / f"{self.key}.pdf", folder / f"{self.key}.png"]
        with settings(self.key):
            figure = self.draw(PRINT)
            with atomic_file(paths[1]) as stream:
                FigureCanvasPdf(figure).print_pdf(stream, metadata={"CreationDate": None, "Producer": None, "Creator": None})
            FigureCanvasAgg(figure)
            with atomic_file(paths[2]) as stream:
                figure.savefig(stream, dpi=DPI, format="png", metadata={"Software": None})
        return paths


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


def shortened(text: str, length: int) -> str:
    """Return a text with an ellipsis in place of the middle of one that is longer: names of files differ at their ends."""
    start, end = (length - 1) // 2, length // 2
    return text if len(text) <= length else f"{text[:start]}\N{HORIZONTAL ELLIPSIS}{text[-end:]}"


def name_rows(figure: Figure, panel: Axes, palette: Palette, heading: str, names: Sequence[str]) -> None:
    """Give a panel one tick with a name for every row, the first at the top, and say above them what the names are."""
    panel.set_yticks(range(len(names)), [shortened(name, _ROW_NAME) for name in names], fontsize=8)
    panel.set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(heading, x=0, ha="left", fontsize=8, color=palette.soft)


def add_legend(figure: Figure, palette: Palette, handles: Sequence[Any]) -> None:
    """Add a legend of all panels above them."""
    width = figure.get_figwidth()
    labels = [shortened(handle.get_label(), int((72 * width - _LEGEND_HANDLE) / _LEGEND_CHARACTER)) for handle in handles]
    columns = legend_columns(labels, width)
    legend = figure.legend(
        handles=list(handles), labels=labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_color(palette.ink)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns of a legend with these labels a figure has room for. `width` is in inches."""
    points = max(map(len, labels), default=0) * _LEGEND_CHARACTER + _LEGEND_HANDLE
    return min(max(1, int(72 * width // points)), max(1, len(labels)))


def byte_scale(largest: float) -> tuple[float, str]:
    """Return the unit of memory in which this value has at most four digits before the point."""
    return next(
        ((2.0**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**power), (1.0, "B")
    )
