"""Values that Python lays over a matrix, as the command reads them."""

from pathlib import Path
from typing import Any

import pytest

from benchbox.api.commands import _yaml
from benchbox.spec.overrides import parse_overrides
from benchbox.spec.source import parse


@pytest.mark.parametrize(
    "value",
    [
        *("/data/run #2", "007", "null", "", "yes", "1.5", "a: b", "[1, 2]", "{a: 1}", "*alias", "'quoted'", '"', "it's, mine"),
        *('two\nlines, "quoted\\"', "tab\t\\", " padded ", 'say "a, b"', "größe=1", "\U0001f916\n"),
        *(7, None, True, [1, "2"], {"lerobot": "/data/run #2"}, ['a"b, c', "\U0001f916"]),
    ],
)
def test_a_value_of_python_arrives_as_it_is(value: Any) -> None:
    overrides = parse_overrides([f"data.lerobot={_yaml(value)}"])
    assert list(overrides) == ["data.lerobot"]
    assert parse(overrides["data.lerobot"], "--set").values == value


def test_a_path_of_python_arrives_as_text() -> None:
    (text,) = parse_overrides([f"data.lerobot={_yaml(Path('/data/run #2'))}"]).values()
    assert parse(text, "--set").values == "/data/run #2"
