"""Links and commands of the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from benchbox.cli.app import app

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def printed_commands(page: Path) -> list[str]:
    """Lines of code blocks without a language that begin with `benchbox`, without their comments."""
    lines = [line for language, block in BLOCK.findall(page.read_text()) if not language for line in block.splitlines()]
    return [re.split(r"\s#\s", line)[0] for line in lines if line.startswith("benchbox ")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    targets = [one or two for one, two in LINK.findall(page.read_text())]
    paths = [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]
    assert [path for path in paths if not (page.parent / path).exists()] == []


def test_every_page_of_docs_is_linked() -> None:
    linked = set()
    for page in PAGES:
        for one, two in LINK.findall(page.read_text()):
            linked.add((page.parent / (one or two)).resolve())
    assert [page.name for page in PAGES if page.is_relative_to(ROOT / "docs") and page.resolve() not in linked] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "reference.md"], ids=name_of)
def test_every_printed_command_names_verbs_options_and_matrices_that_exist(page: Path) -> None:
    problems = []
    for line in printed_commands(page):
        words = shlex.split(line)
        words = words[1 : words.index("--")] if "--" in words else words[1:]
        command = get_command(app)
        while getattr(command, "commands", None) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        if getattr(command, "commands", None):
            problems.append(f"{line}: no such verb")
        problems += [f"{line}: no option {word}" for word in words if word.startswith("-") and word not in options]
        problems += [f"{line}: no {word}" for word in words if word.startswith("matrices/") and not (ROOT / word).exists()]
    assert problems == []


def test_the_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_printed_commands_are_found() -> None:
    assert len(printed_commands(ROOT / "README.md")) >= 6
    assert "benchbox plan matrices/fsdp_vs_zero2.yaml" in [line.rstrip() for line in printed_commands(ROOT / "README.md")]
