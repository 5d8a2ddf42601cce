"""Words about files that are not trusted. This module imports nothing: whoever reads other formats needs no DCP."""

PROGRAM = "a program, not read and not run"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message."""
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
