"""Values that Python lays over a matrix, as the command reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchbox.api.commands import _yaml
from benchbox.errors import ConfigurationError
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
    overrides = parse_overrides([f"data.lerobot={_yaml('', value)}"])
    assert list(overrides) == ["data.lerobot"]
    assert parse(overrides["data.lerobot"], "--set").values == value


def test_a_path_of_python_arrives_as_text() -> None:
    (text,) = parse_overrides([f"data.lerobot={_yaml('', Path('/data/run #2'))}"]).values()
    assert parse(text, "--set").values == "/data/run #2"


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    assert _yaml("", {"batch": np.arange(1, 3), "lr": np.float64(0.5), "steps": np.int64(3)}) == _yaml(
        "", {"batch": [1, 2], "lr": 0.5, "steps": 3}
    )


@pytest.mark.parametrize("value", [object(), {1, 2}, b"tiny", [range(3)]])
def test_a_value_that_yaml_lacks_is_one_line(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^overrides size: .* is no value of a matrix; give numbers, [^\n]*$"):
        _yaml("overrides size", value)
