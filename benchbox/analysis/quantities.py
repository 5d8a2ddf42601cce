"""Numbers formatted for people: a value with its unit, a few significant digits and a suitable prefix."""

from __future__ import annotations

import math

UNKNOWN = "-"

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def quantity(value: float | None, unit: str, digits: int = 3) -> str:
    """Format a value with its unit: `quantity(0.2034, "s")` is `203 ms`, `quantity(2**30, "bytes")` is `1.00 GiB`.

    An unknown value is a dash.
    """
    if value is None:
        return UNKNOWN
    if unit == "s":
        scale, name = (1.0, "s") if abs(value) >= 1 else (1e3, "ms")
        return f"{significant(value * scale, digits)} {name}"
    if unit == "bytes":
        if abs(value) < 1024:
            return f"{value:.0f} B"
        step = min(int(math.log2(abs(value)) // 10), len(_BYTES) - 1)
        return f"{significant(value / 1024**step, digits)} {_BYTES[step]}"
    if unit == "FLOP":
        step = min(int(math.log10(max(abs(value), 1)) // 3), len(_THOUSANDS) - 1)
        return f"{significant(value / 1000**step, digits)} {_THOUSANDS[step]}FLOP"
    if unit == "fraction":
        return f"{significant(value * 100, digits)}%"
    if unit == "ratio":
        return f"{value:.{digits}f}"
    if unit == "batch":
        return f"{value:.0f}"
    if unit == "loss":
        return significant(value, max(digits, 4))
    return f"{significant(value, digits)} {unit}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things: `1 cell`, `2 cells`; `plural` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def significant(value: float, digits: int = 3) -> str:
    """Format a number with the given significant digits; in scientific notation only outside 1e-4 to 1e9."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return f"{float(text):.0f}" if "e" in text or text[-1] == "." else text
