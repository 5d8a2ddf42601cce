"""A misspelt key of a launch record or a rank result is an error of the type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[3]
SNIPPET = """\
{imports}
def read(value: {type}) -> object:
    return {expression}
"""
KEYS = [
    ("registry.launch_record", "LaunchRecord", 'value["step_time_s"]', "step_times"),
    ("registry.launch_record", "Memory", 'value["worst"]["allocated_peak_bytes"]', "allocated_bytes"),
    ("store.rank_result", "RankResult", 'value["observed"]["device"]', "devices"),
]
FUNCTIONS = [
    ("analysis.adam_state", "adam_dtypes(value)"),
    ("analysis.invariants", "verify_records([value])"),
    ("analysis.summary", "summarize(None, [value])"),
    ("analysis.baseline", "machine_folder([value])"),
    ("report.view", "build_report(None, [value])"),
    ("store.table", "launch_table([value])"),
    ("store.packed", "write_packed(None, [value])"),
]


@pytest.fixture(scope="module")
def errors_by_expression(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run mypy, as configured for the package, once on a snippet for each expression, and return its output by expression."""
    folder = tmp_path_factory.mktemp("mypy")
    snippets: dict[str, str] = {}
    for module, record_type, right, misspelt in KEYS:
        imports = f"from benchbox.{module} import {record_type}"
        for expression in (right, misspell(right, misspelt)):
            snippets[expression] = SNIPPET.format(imports=imports, type=record_type, expression=expression)
    for module, call in FUNCTIONS:
        imports = f"from benchbox.{module} import {call.partition('(')[0]}"
        snippets[call] = SNIPPET.format(imports=imports, type="dict[str, object]", expression=call)
    return type_check(snippets, folder)


def misspell(expression: str, misspelt: str) -> str:
    key = expression.split('"')[-2]
    return expression.replace(key, misspelt)


def type_check(snippets: Mapping[str, str], folder: Path) -> dict[str, str]:
    files = {name: folder / f"snippet_{index}.py" for index, name in enumerate(snippets)}
    for name, file in files.items():
        file.write_text(snippets[name])
    # With the cache of `make lint`, by which mypy reads only sources that have changed: it would read all of torch for 14 s.
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", *files.values()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert f"(checked {len(files)} source files)" in done.stdout, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return {name: "\n".join(line for line in lines if f"{file.name}:" in line) for name, file in files.items()}


@pytest.mark.parametrize(("module", "record_type", "right", "misspelt"), KEYS)
def test_a_misspelt_key_is_an_error_and_the_right_key_is_none(errors_by_expression, module, record_type, right, misspelt):
    assert errors_by_expression[right] == "", (module, record_type)
    errors = errors_by_expression[misspell(right, misspelt)]
    assert f'has no key "{misspelt}"  [typeddict-item]' in errors
    assert ".py:3: error" in errors


@pytest.mark.parametrize(("module", "call"), FUNCTIONS)
def test_functions_that_read_records_accept_no_untyped_dictionary(errors_by_expression, module, call):
    """Otherwise the keys that they read would not be checked."""
    errors = errors_by_expression[call]
    assert '"dict[str, object]"' in errors, module
    assert "LaunchRecord" in errors
