"""Comparison of docs/glossary.md with the identifiers of the code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENTRY = re.compile(r"^### (?P<term>.+)\n\n(?P<definition>(?:.+\n)+)\nCode: (?P<code>(?:.+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A term, its definition, the identifiers that carry it and the words to avoid."""

    term: str
    definition: str
    identifiers: tuple[str, ...]
    avoided: tuple[str, ...]


def read_glossary(text: str) -> list[Entry]:
    """Parse every `###` section.

    Raises:
        ValueError: a section lacks its definition, its line `Code:` or its words to avoid.
    """
    entries = []
    for match in ENTRY.finditer(text):
        code, separator, avoided = match["code"].replace("\n", " ").strip().removesuffix(".").partition(". Not: ")
        identifiers = tuple(re.findall(r"`([^`]+)`", code))
        if not separator or not identifiers:
            raise ValueError(f"{match['term']}: expected 'Code: `identifier`, ... . Not: word, ...'")
        entries.append(Entry(match["term"], match["definition"], identifiers, tuple(re.split(r",\s*", avoided))))
    if len(entries) != len(re.findall(r"^### ", text, re.MULTILINE)):
        raise ValueError("a section has no definition or no line 'Code:'")
    return entries


def identifiers_of(tree: ast.Module) -> set[str]:
    """Names of variables, arguments, attributes, functions, classes and members as `Class.member`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names.update(f"{node.name}.{member}" for member in members_of(node))
    return names


def members_of(definition: ast.ClassDef) -> set[str]:
    methods = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
    fields = {
        node.target.id for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return methods | fields


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return read_glossary((ROOT / "docs" / "glossary.md").read_text())


@pytest.fixture(scope="module")
def code() -> set[str]:
    paths = [path for folder in ("benchbox", "policies") for path in (ROOT / folder).rglob("*.py")]
    return set().union(*(identifiers_of(ast.parse(path.read_text())) for path in paths))


def test_every_identifier_of_the_glossary_exists(entries: list[Entry], code: set[str]) -> None:
    missing = [f"{entry.term}: {name}" for entry in entries for name in entry.identifiers if name not in code]
    assert missing == []


def test_no_word_to_avoid_is_an_identifier(entries: list[Entry], code: set[str]) -> None:
    used = {name.strip("_").lower() for name in code}
    assert [f"{entry.term}: {word}" for entry in entries for word in entry.avoided if word.lower() in used] == []


def test_no_term_is_defined_twice_and_none_is_avoided(entries: list[Entry]) -> None:
    terms = Counter(entry.term.lower() for entry in entries)
    assert [term for term, count in terms.items() if count > 1] == []
    assert [word for entry in entries for word in entry.avoided if word.replace("_", " ") in terms] == []


def test_no_class_carries_two_terms(entries: list[Entry]) -> None:
    classes = Counter(name for entry in entries for name in set(entry.identifiers) if name[0].isupper() and "." not in name)
    assert {name for name, count in classes.items() if count > 1} == set()


def test_terms_that_the_readme_of_a_newcomer_needs_are_there(entries: list[Entry]) -> None:
    needed = {
        "rank",
        "world size",
        "micro-batch",
        "step",
        "phase",
        "master weights",
        "census",
        "finding",
        "facts",
        "launch",
        "cell",
    }
    needed |= {"matrix", "run", "baseline", "backend", "recipe", "layer unit", "shard", "policy", "rule", "metric"}
    assert needed <= {entry.term for entry in entries}


@pytest.mark.parametrize(
    "text",
    [
        "### rank\n\nA process.\n",
        "### rank\n\nCode: `rank`. Not: peer.\n",
        "### rank\n\nA process.\n\nCode: `rank`.\n",
        "### rank\n\nA process.\n\nCode: rank. Not: peer.\n",
    ],
)
def test_an_incomplete_section_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"rank|section"):
        read_glossary(text)
