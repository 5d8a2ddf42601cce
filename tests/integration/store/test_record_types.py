"""A misspelt key of a launch record or a rank result is an error of the type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SNIPPET = """\
{imports}
def read(value: {type}) -> object:
    return {expression}
"""


@pytest.fixture(scope="module")
def type_check(tmp_path_factory):
    """Return a function that runs mypy, as configured for the package, on a snippet and returns its output."""
    folder = tmp_path_factory.mktemp("mypy")

    def check(imports, value_type, expression):
        snippet = folder / "snippet.py"
        snippet.write_text(SNIPPET.format(imports=imports, type=value_type, expression=expression))
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            ROOT / "pyproject.toml",
            "--cache-dir",
            folder / "cache",
            snippet,
        ]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300).stdout

    return check


@pytest.mark.parametrize(
    ("module", "record_type", "right", "misspelt"),
    [
        ("registry.launch_record", "LaunchRecord", 'value["step_time_s"]', "step_times"),
        ("registry.launch_record", "Memory", 'value["worst"]["allocated_peak_bytes"]', "allocated_bytes"),
        ("store.rank_result", "RankResult", 'value["observed"]["device"]', "devices"),
    ],
)
def test_a_misspelt_key_is_an_error_and_the_right_key_is_none(type_check, module, record_type, right, misspelt):
    imports = f"from benchbox.{module} import {record_type}"
    assert type_check(imports, record_type, right).startswith("Success")
    key = right.split('"')[-2]
    errors = type_check(imports, record_type, right.replace(key, misspelt))
    assert f'has no key "{misspelt}"  [typeddict-item]' in errors
    assert "snippet.py:3: error" in errors


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("analysis.comparability", "adam_dtypes(value)"),
        ("analysis.invariants", "verify_records([value])"),
        ("analysis.summary", "metric_words(None, [value])"),
        ("analysis.baseline", "machine_of([value])"),
        ("report.view", "build_report(None, [value])"),
        ("store.table", "launch_table([value])"),
        ("store.packed", "write_packed(None, [value])"),
    ],
)
def test_functions_that_read_records_accept_no_untyped_dictionary(type_check, module, call):
    """Otherwise the keys that they read would not be checked."""
    function = call.partition("(")[0]
    errors = type_check(f"from benchbox.{module} import {function}", "dict[str, object]", call)
    assert '"dict[str, object]"' in errors
    assert "LaunchRecord" in errors
