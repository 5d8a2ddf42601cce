"""Rewriting of type parameters (PEP 695), the one syntax of Python 3.12 that lerobot uses, for Python 3.11.

Only annotations are affected: `type X = Y` becomes `X = Y`, and parameters become type variables. Sources without them are left
as they are, and with Python 3.12 or later nothing is rewritten.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_ALIAS = re.compile(r"^type (\w+) = ", re.MULTILINE)
_DEFINITION = re.compile(r"^((?:@.*\n)*)(class|def) (\w+)\[((?:[^\[\]]|\[[^\[\]]*\])+)\](?:\(([^)]*)\)|)", re.MULTILINE)


def lower_type_parameters(source: str) -> str:
    """Return a source without type aliases and type parameters at the top level."""
    return _DEFINITION.sub(_lower_definition, _ALIAS.sub(r"\1 = ", source))


def _lower_definition(match: re.Match[str]) -> str:
    decorators, kind, name, parameters, arguments = match.groups()
    # Bounds are left out: they may contain commas in brackets.
    names = [parameter.partition(":")[0].strip() for parameter in re.sub(r"\[.*?\]", "", parameters).split(",")]
    variables = "".join(f"{variable} = __import__('typing').TypeVar('{variable}')\n" for variable in names)
    if kind == "def":
        return f"{variables}{decorators}def {name}({arguments})"
    bases = [*filter(None, [arguments]), f"__import__('typing').Generic[{', '.join(names)}]"]
    return f"{variables}{decorators}class {name}({', '.join(bases)})"


def lower_package(site_packages: Path, name: str = "lerobot") -> None:
    """Rewrite the sources of an installed package, if this interpreter is older than Python 3.12."""
    if sys.version_info >= (3, 12):
        return
    for path in sorted((site_packages / name).rglob("*.py")):
        source = path.read_text()
        if (lowered := lower_type_parameters(source)) != source:
            path.write_text(lowered)
