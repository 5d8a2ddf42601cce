"""Texts from outside that may hold any character."""


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters of a text that comes from outside: names may contain anything."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
