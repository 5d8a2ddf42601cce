"""Declarations that a policy makes at the top of its `policy.py`, read from its source: planning imports no policy."""

from __future__ import annotations

import ast
from functools import lru_cache


@lru_cache(maxsize=512)
def parse_policy(source: bytes) -> ast.Module | None:
    """Return the syntax tree of a policy's module; None if it is not Python, which the rank that imports it reports."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def policy_summary(source: bytes) -> str:
    """Return the first line of the docstring of a policy's module, empty if it has none."""
    tree = parse_policy(source)
    docstring = None if tree is None else ast.get_docstring(tree)
    return (docstring or "").partition("\n")[0]


def declared_texts(source: bytes, name: str) -> tuple[tuple[str, ...], int] | None:
    """Return the texts of `name = ("a", "b")` and its line; no texts if it is anything else, None if it is not there."""
    tree = parse_policy(source)
    for statement in tree.body if tree is not None else ():
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if name not in [getattr(target, "id", "") for target in targets]:
            continue
        try:
            value = ast.literal_eval(statement.value)
        except (TypeError, ValueError):
            value = None
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, tuple | list) else ()
        return texts if all(isinstance(text, str) for text in texts) else (), statement.lineno
    return None
