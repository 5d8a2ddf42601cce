"""Arguments that several verbs share.

No `from __future__ import annotations` here or in a verb module: typer reads annotations at run time.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

# Paths are not checked by typer: `load_matrix` says more (what is in the directory, which file was meant).
MatrixArgument = Annotated[Path, typer.Argument(metavar="MATRIX", help="A matrix file.", show_default=False)]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE,..",
        default_factory=list,
        show_default=False,
        help="Lay values over the matrix: size=full,axes.batch=[1,2].",
    ),
]
OnlyOption = Annotated[
    str, typer.Option("--only", metavar="EXPR", help="Only these cells: backend=zero2, cams!=1, backend in [zero2,ddp].")
]
PolicyDirOption = Annotated[
    list[Path],
    typer.Option("--policy-dir", metavar="DIR", default_factory=list, show_default=False, help="A further folder of policies."),
]


class Format(StrEnum):
    """How to print."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print.")]
