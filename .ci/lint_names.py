"""Check the names and docstrings of the repository: `python .ci/lint_names.py [ROOT]`.

Three rules, in CONTRIBUTING.md under "Language":

1. no public class name is defined twice in `benchbox` and `policies` together;
2. less than 1 % of all identifiers are pronoun-like words, in each of `benchbox`, `policies` and `tests`;
3. a docstring's first line stands alone: it does not begin with a word that refers to the name above it.

Prints `file:line: message` for every violation, then one line of counts for each folder. Exit code 1 when a rule is violated.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FOLDERS = ("benchbox", "policies", "tests")
SHIPPED_FOLDERS = ("benchbox", "policies")

MAX_PRONOUN_SHARE = 0.01
# fmt: off
PRONOUNS = frozenset({
    "each", "found", "held", "told", "place", "said", "seen", "kept", "met", "given", "taken", "whole",
    "many", "few", "own", "other", "rest", "next", "last", "first", "it", "they", "whose", "known", "heard",
    "stands", "goes", "comes",
})
FORBIDDEN_FIRST_WORDS = frozenset({
    "What", "Of", "How", "Who", "Whose", "Why", "Where", "Which", "Whether", "From", "By", "For", "As",
    "Those", "That",
})
# fmt: on
FORBIDDEN_BEGINNING = ["The", "same"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A place that breaks a rule."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(slots=True)
class FolderNames:
    """Counts and violations of one top-level folder."""

    folder: str
    identifiers: int = 0
    pronouns: list[Violation] = field(default_factory=list)
    docstrings: list[Violation] = field(default_factory=list)
    classes: list[tuple[str, Violation]] = field(default_factory=list)  # public name, its definition

    @property
    def pronoun_share(self) -> float:
        return len(self.pronouns) / max(self.identifiers, 1)


def main(arguments: Sequence[str]) -> int:
    """Check the repository at `arguments[0]`, by default the one that this file is in, and return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    folders = [read_folder(root, folder) for folder in FOLDERS]
    violations = duplicate_classes([names for names in folders if names.folder in SHIPPED_FOLDERS])
    for names in folders:
        violations += names.docstrings
        if names.pronoun_share >= MAX_PRONOUN_SHARE:
            violations += names.pronouns
    for violation in sorted(violations, key=lambda violation: (violation.path, violation.line, violation.message)):
        print(violation)
    for names in folders:
        print(
            f"{names.folder}: {len(names.pronouns)} of {names.identifiers} identifiers are pronoun-like "
            f"({names.pronoun_share:.2%}; must be below {MAX_PRONOUN_SHARE:.0%})"
        )
    return 1 if violations else 0


def read_folder(root: Path, folder: str) -> FolderNames:
    """Read every Python file below `root / folder`."""
    names = FolderNames(folder)
    for path in sorted((root / folder).rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
        _read_file(tree, relative, names)
    return names


def _read_file(tree: ast.Module, path: str, names: FolderNames) -> None:
    identifiers = list(iter_identifiers(tree))
    next_is_rebound = any(name == "next" and not is_load for name, _, is_load in identifiers)
    for name, line, is_load in identifiers:
        names.identifiers += 1
        is_builtin_next = name == "next" and is_load and not next_is_rebound
        if name.strip("_") in PRONOUNS and not is_builtin_next:
            names.pronouns.append(Violation(path, line, f"identifier {name!r} does not say what it holds"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            names.classes.append((node.name, Violation(path, node.lineno, f"class {node.name}")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            names.docstrings += _check_docstring(node, path)


def iter_identifiers(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield (name, line, whether it is only read) of variables, arguments, functions, classes and assigned attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno, isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, False
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno, False


def _check_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, path: str
) -> Iterator[Violation]:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    words = docstring.splitlines()[0].split()
    beginning = " ".join(words[:2]) if words[:2] == FORBIDDEN_BEGINNING else words[0].rstrip(",:;.")
    if beginning in FORBIDDEN_FIRST_WORDS or words[:2] == FORBIDDEN_BEGINNING:
        line = node.body[0].lineno
        yield Violation(path, line, f"docstring begins with {beginning!r}: begin with an imperative or a noun phrase")


def duplicate_classes(folders: Sequence[FolderNames]) -> list[Violation]:
    """Return a violation for every further definition of a public class name, pointing to the first one."""
    definitions: dict[str, list[Violation]] = defaultdict(list)
    for names in folders:
        for name, definition in names.classes:
            definitions[name].append(definition)
    return [
        Violation(again.path, again.line, f"class {name} is already defined in {places[0].path}:{places[0].line}")
        for name, places in definitions.items()
        for again in places[1:]
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
