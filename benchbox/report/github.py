"""Workflow commands of GitHub Actions, which annotate files in a pull request.

The format is that of https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

from benchbox.report.unprintable import escape_unprintable


def annotation(level: str, title: str, message: str, *, file: str | None = None, line: int | None = None) -> str:
    """Return an annotation; without a file it is one of the whole workflow.

    Args:
        level: `error`, `warning` or `notice`.
    """
    where = f"file={_escape_property(file)},line={line or 1}," if file else ""
    return f"::{level} {where}title={_escape_property(title)}::{_escape(message)}"


def _escape(text: str) -> str:
    text = "".join(char if char in "\r\n" else escape_unprintable(char) for char in text)
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
