"""Sources of Python 3.12 that Python 3.11 can run after their type parameters were rewritten."""

from __future__ import annotations

import sys
from typing import Generic, get_args

from tests.parity.type_parameters import lower_package, lower_type_parameters

SOURCE = """
from dataclasses import dataclass

type Number = int | float


@dataclass
class Base:
    first: int


@dataclass
class Pair[A, B](Base):
    second: int


class Box[T: Number]:
    content = None


def identity[T: dict[str, int], U](x: T, y: U) -> T:
    return x


type = "no statement"
values = [1, 2]
total = values[0]
"""


def test_rewritten_sources_define_the_same_classes_and_functions():
    names = {}
    exec(compile(lower_type_parameters(SOURCE), "lowered", "exec", flags=0, dont_inherit=True), names)
    pair = names["Pair"](1, second=2)
    assert (pair.first, pair.second) == (1, 2)
    assert issubclass(names["Pair"], names["Base"])
    assert issubclass(names["Box"], Generic)
    assert get_args(names["Pair"][int, str]) == (int, str), "classes take type arguments"
    assert names["identity"]({"a": 3}, 4) == {"a": 3}
    assert names["Number"] == int | float
    assert (names["type"], names["total"]) == ("no statement", 1)


def test_only_sources_with_type_parameters_are_written(tmp_path):
    package = tmp_path / "peer"
    package.mkdir()
    (package / "new.py").write_text(SOURCE)
    (package / "old.py").write_text("x = 1\n")
    before = (package / "old.py").stat().st_mtime_ns
    lower_package(tmp_path, "peer")
    assert ((package / "new.py").read_text() != SOURCE) == (sys.version_info < (3, 12))
    assert (package / "old.py").stat().st_mtime_ns == before
