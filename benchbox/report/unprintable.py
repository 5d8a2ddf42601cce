"""Texts from outside that may hold any character."""


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters of a text that comes from outside: names may contain anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def escape_lines(text: str) -> str:
    """Escape the unprintable characters of a text but for its line breaks, so that no sequence of it controls a terminal."""
    return "\n".join(escape_unprintable(line) for line in text.split("\n"))
