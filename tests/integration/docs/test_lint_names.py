"""The language check of `make lint`, on small trees that break one rule at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "lint_names.py"

CLEAN = '''"""Sums of gradients."""


def sum_gradients(gradients: list[float]) -> float:
    """Return the sum."""
    iterator = iter(gradients)
    return next(iterator) + sum(iterator)
'''


def run_check(root: Path, **files: str) -> subprocess.CompletedProcess[str]:
    """Write `files` (keyword `benchbox__step` is benchbox/step.py) beside a clean tree and run the check on it."""
    for folder in ("benchbox", "policies", "tests"):
        (root / folder).mkdir()
        (root / folder / "clean.py").write_text(CLEAN)
    for name, text in files.items():
        (root / f"{name.replace('__', '/')}.py").write_text(text)
    return subprocess.run([sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, timeout=60)


def test_a_clean_tree_passes_and_its_shares_are_printed(tmp_path: Path) -> None:
    result = run_check(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"{folder}: 0 of 12 identifiers are pronoun-like (0.00%; must be below 1%)"
        for folder in ("benchbox", "policies", "tests")
    ]


def test_a_public_class_name_defined_twice_is_reported_at_its_second_definition(tmp_path: Path) -> None:
    result = run_check(tmp_path, benchbox__one="class Probe:\n    pass\n", policies__two="\n\nclass Probe:\n    pass\n")
    assert result.returncode == 1
    assert "policies/two.py:3: class Probe is already defined in benchbox/one.py:1" in result.stdout.splitlines()


def test_private_classes_and_classes_of_tests_may_share_names(tmp_path: Path) -> None:
    result = run_check(
        tmp_path,
        benchbox__one="class _State:\n    pass\n\n\nclass Probe:\n    pass\n",
        policies__two="class _State:\n    pass\n",
        tests__three="class Probe:\n    pass\n",
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("folder", ["benchbox", "policies", "tests"])
def test_one_percent_of_pronoun_like_identifiers_fails_in_every_folder(tmp_path: Path, folder: str) -> None:
    names = "".join(f"width_{number} = 1\n" for number in range(87))
    below, at_limit = tmp_path / "below", tmp_path / "at_limit"
    below.mkdir()
    at_limit.mkdir()
    green = run_check(below, **{f"{folder}__names": f"{names}width = 1\nfound = 1\n"})
    red = run_check(at_limit, **{f"{folder}__names": f"{names}found = 1\n"})
    assert green.returncode == 0, green.stdout
    assert f"{folder}: 1 of 101 identifiers are pronoun-like (0.99%; must be below 1%)" in green.stdout
    assert red.returncode == 1
    assert f"{folder}/names.py:88: identifier 'found' does not say what it holds" in red.stdout.splitlines()
    assert f"{folder}: 1 of 100 identifiers are pronoun-like (1.00%; must be below 1%)" in red.stdout


@pytest.mark.parametrize(
    "code",
    [
        "for each in []:\n    pass\n",
        "def step(told: int) -> None:\n    pass\n",
        "def _told() -> None:\n    pass\n",
        "import os\nos.last = 1\n",
        "class rest:\n    pass\n",
        "next = iter([])\nnext(next)\n",
    ],
)
def test_every_kind_of_identifier_counts(tmp_path: Path, code: str) -> None:
    result = run_check(tmp_path, benchbox__names=code)
    assert result.returncode == 1
    assert "does not say what it holds" in result.stdout


@pytest.mark.parametrize(
    "first_line",
    ["What a step gave.", "The same for rank 0.", "Whether it trains.", "From a cell to a session.", "As records hold it."],
)
@pytest.mark.parametrize(
    "template", ['"""{}"""\n', 'class Probe:\n    """{}"""\n', 'def probe():\n    """{}\n\n    More.\n    """\n']
)
def test_a_docstring_that_refers_to_the_name_above_it_is_reported(tmp_path: Path, first_line: str, template: str) -> None:
    result = run_check(tmp_path, tests__probe=template.format(first_line))
    assert result.returncode == 1
    beginning = "The same" if first_line.startswith("The same") else first_line.split()[0]
    assert f": docstring begins with {beginning!r}" in result.stdout


def test_a_first_line_that_stands_alone_passes(tmp_path: Path) -> None:
    lines = [
        "Return whether the tensor is sharded.",
        "Forward pass of a policy.",
        "Bytes of one shard.",
        "The samefile of a path.",
    ]
    code = "".join(f'def function_{number}():\n    """{line}"""\n\n\n' for number, line in enumerate(lines))
    result = run_check(tmp_path, benchbox__functions=code)
    assert result.returncode == 0, result.stdout
